"""`turnfold stragglers`: is what was trained a fair sample of what was dispatched?"""
