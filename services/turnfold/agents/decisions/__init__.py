"""Which groups the assembler has decided on, as it happens."""
