import pytest

from jaxgen import GenerationConfig
from jaxgen.core.config.ends import with_end_of_turn
from jaxgen.core.config.tables import eos_list
from tests.support.models import model_config
from tests.support.tokenizers import byte_level

END, EOS = 260, 262  # <|end|>, and the tokenizer's <|im_end|>


@pytest.mark.parametrize(
    ("eos", "size", "ends"),
    [
        (END, 320, [END, EOS]),
        ([END, EOS], 320, [END, EOS]),
        (EOS, 320, [EOS]),
        (None, 320, [EOS]),
        (END, 262, [END]),  # the model's vocabulary lacks the tokenizer's token
    ],
)
def test_end_of_turn_of_the_tokenizer_is_added(eos, size, ends):
    cfg = GenerationConfig(model=model_config(vocab_size=size), eos_token_id=eos, pad_token_id=0)
    assert eos_list(with_end_of_turn(cfg, byte_level()).eos_token_id) == ends


def test_a_tokenizer_without_an_end_changes_nothing():
    cfg = GenerationConfig(model=model_config(), eos_token_id=3, pad_token_id=0)
    assert with_end_of_turn(cfg, byte_level(eos_token=None)) is cfg
