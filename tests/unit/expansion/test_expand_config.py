"""A model's config learns the new width where that describes the model."""

import copy
from dataclasses import dataclass

from place_models import Plain
from torch import nn

from fissile import expand, to_dense


class Described(nn.Module):
    """A model made from a config, as transformers' are."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Plain(6, config.d_ff, 6) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Config:
    d_ff, hidden_dim = 5, 5


def test_the_config_learns_the_new_width_if_that_describes_the_model():
    dense = Described(Config())
    wide = expand(dense, 3)
    assert (wide.config.d_ff, dense.config.d_ff) == (15, 5)
    assert wide.config.hidden_dim == 5, "a width that describes something else was changed"
    rebuilt = Described(wide.config)
    rebuilt.load_state_dict(to_dense(wide).state_dict())
    assert expand(dense, 3, where="blocks.0").config.d_ff == 5, "half the blocks are narrow"
    expand(dense, 3, inplace=True)
    assert dense.config.d_ff == 15


def test_a_config_that_cannot_build_the_model_is_left_alone():
    class Stubborn(Described):
        def __init__(self, config):
            if config.d_ff != 5:
                raise RuntimeError("only five")
            super().__init__(config)

    assert expand(Stubborn(Config()), 2).config.d_ff == 5


def test_copies_of_the_config_in_parts_of_the_model_learn_the_width_too():
    class Outer(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.inner, self.dense = Described(copy.copy(config)), nn.Linear(6, 6)
            self.dense.config = copy.copy(config)

        def forward(self, x):
            return self.dense(self.inner(x))

    wide = expand(Outer(Config()), 3)
    assert (wide.config.d_ff, wide.inner.config.d_ff) == (15, 15)
    assert wide.dense.config.d_ff == 5, "nothing is expanded there"


def test_a_config_shared_with_the_model_around_changes_for_both():
    outer = nn.ModuleDict({"inner": Described(Config())})
    outer.config = outer["inner"].config
    expand(outer["inner"], 2, inplace=True)
    assert outer.config is outer["inner"].config
    assert outer.config.d_ff == 10


def test_a_config_that_will_not_change_stays():
    @dataclass(frozen=True)
    class Frozen:
        d_ff: int = 5

        def __deepcopy__(self, memo):
            return Config()

    dense = Described(Frozen())
    expand(dense, 2, inplace=True)
    assert (dense.config.d_ff, dense.blocks[0].one.out_features) == (5, 10)
