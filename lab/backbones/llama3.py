"""Llama with the RoPE of Llama 3, made for longer texts: slow rotations become slower, and fast ones stay as
they are."""

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
            low = self.low_freq_factor
            raise ValueError(
                f"low_freq_factor = {low}: it must be below high_freq_factor = {self.high_freq_factor}"
            )


class Backbone(Llama):
    name = "llama3"
    Options = Options

    def __init__(self, config):
        super().__init__(config)
        self.options = Options(**config.backbone_options)

    def inverse_frequencies(self, device):
        """As Llama.inverse_frequencies, with slow rotations slowed down further.

        Whether a rotation is slow depends on how many turns it makes in the window of the original training:
        fewer than low_freq_factor turns are slow, more than high_freq_factor turns are fast, and between the
        two the frequency is interpolated.
        """
        o = self.options
        frequency = super().inverse_frequencies(device)
        turns = o.original_max_position_embeddings * frequency / (2 * math.pi)
        span = o.high_freq_factor - o.low_freq_factor
        fast = ((turns - o.low_freq_factor) / span).clamp(0, 1)  # from 0 (slow) to 1 (fast)
        return frequency * (fast + (1 - fast) / o.factor)
