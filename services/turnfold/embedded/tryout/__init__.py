"""An agent on a few tasks, with a gateway and an engine but nothing that trains."""
