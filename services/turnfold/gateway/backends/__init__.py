"""Engines that sample: token ids in, token ids with logprobs out."""
