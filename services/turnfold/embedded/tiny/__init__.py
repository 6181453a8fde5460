"""A tiny language model that RL can teach, and the toy task that it is taught."""
