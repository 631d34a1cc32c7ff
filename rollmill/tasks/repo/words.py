"""The small vocabulary from which worlds are made: short names that never clash with shell or Python words."""

from __future__ import annotations

import random

NAMES = (
    "acorn amber anvil apple arrow ash badge barn basin beach bell berry birch blade bloom boat bolt book brick brook brush cabin "
    "camel candle canoe cargo cedar chalk cliff clock cloud clover coal cobra comet copper coral crane crown delta desk dome drum dune "
    "eagle ember falcon feather fern fig flint forest fox frost garden glove grape gull harbor hazel heron hill honey ice iris ivory "
    "jade kettle kite lake lamp leaf lemon lily linen lotus magnet mango maple marble meadow mint moon moss nest oak olive onyx opal "
    "orbit otter owl oyster palm panda pearl pebble pepper piano pine pixel plum pond poppy quail quartz rain raven reef ridge river "
    "robin rocket rose ruby saddle sage salt sand seal shell silk silver slate snow spruce star stone storm sun swan tiger topaz torch "
    "trout tulip tunnel valley velvet violet walnut wave whale willow wind wolf yarn zebra"
).split()


def draw(rng: random.Random, count: int) -> list[str]:
    """Different names."""
    return rng.sample(NAMES, count)
