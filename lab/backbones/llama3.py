"""Llama with Llama 3's RoPE for longer texts: slow rotations get slower, fast ones do not."""

import math

from model import Llama, Positive, validated_dataclass


@validated_dataclass
class Options:
    """The names are those of `rope_parameters` in Hugging Face's config.json."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Positive

    def __post_init__(self):
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"low_freq_factor = {self.low_freq_factor} is not below the high one")


class Backbone(Llama):
    name, Options = "llama3", Options

    def __init__(self, config):
        super().__init__(config)
        self.options = Options(**config.backbone_options)

    def inverse_frequencies(self, device):
        """A rotation counts by how many turns it makes in the first window of the training: below
        `low` it is slow, above `high` fast, between them a mean of both by how far it is."""
        o, frequency = self.options, super().inverse_frequencies(device)
        turns = o.original_max_position_embeddings * frequency / (2 * math.pi)
        span = o.high_freq_factor - o.low_freq_factor
        fast = ((turns - o.low_freq_factor) / span).clamp(0, 1)
        return frequency * (fast + (1 - fast) / o.factor)
