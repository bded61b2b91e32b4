"""The demo: a small trained diffusion transformer, streamed over a few ranks, with proof."""
