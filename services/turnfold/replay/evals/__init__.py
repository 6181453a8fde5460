"""`turnfold evals`: what the policy scored, round by round."""
