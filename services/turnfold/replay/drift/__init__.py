"""`turnfold drift`: where clients left what was sampled, why, and what it cost."""
