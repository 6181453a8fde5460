"""`turnfold doctor`: what a run needs, what is there, and what to do about the rest."""
