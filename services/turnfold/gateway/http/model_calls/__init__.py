"""Endpoints of the model APIs: a request becomes a turn, answered whole or as a stream."""
