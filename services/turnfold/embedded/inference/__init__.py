"""A small inference server over transformers that speaks the HTTP of vLLM's token-in, token-out
API.

It serves the tiny model of the demo and of the tests on a laptop's CPU. It is exact before it is
fast: logprobs are those of a plain forward pass, and no token is ever sampled from a cache that
other weights computed.
"""
