"""Training: steps, loops, data and low-rank updates."""

from jaxgen.training import lora as lora, policy as policy
from jaxgen.training.dataset import pack as pack, read_examples as read_examples, shuffled as shuffled
from jaxgen.training.examples import Example as Example
from jaxgen.training.loop import (
    TrainBatch as TrainBatch,
    TrainConfig as TrainConfig,
    TrainState as TrainState,
    evaluate as evaluate,
    train as train,
    train_step as train_step,
)
from jaxgen.training.record import Evaluation as Evaluation
