"""What the head compiles to on an H100."""

import jax
import jax.numpy as jnp
import pytest
from tinylm import head

LOGITS = jax.ShapeDtypeStruct((2048, head.VOCABULARY), jnp.float32)


@pytest.mark.fusion(target="h100")
def test_probabilities(fusion):
    fusion.check(head.probabilities, LOGITS)


def test_masked_probabilities(fusion):
    def masked(logits):
        return head.probabilities(head.mask_padding(logits, 16000))

    fusion.check(masked, LOGITS)
