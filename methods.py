"""Every method by its name: what `--method` chooses, and what a directory of weights holds.

name        class, file                    what happens K more times for each token
ponderlm3   PonderLM, model.py             up to K states are fed back, as many as the router wants
ponderlm2   PonderLM, router 'always'      all K states are fed back
vanilla     PonderLM, K = 0                nothing
looped      LoopedLM, baselines.py         the stack of layers runs again on its own output
pause       Pause, baselines.py            a pause token is read
ponderlm1   PonderLM1, baselines.py        the mean embedding of the predicted token is fed back
mor-expert  ExpertChoice, mor.py           the stack runs again on the tokens that it ranks highest
mor-token   TokenChoice, mor.py            the stack runs again if the token chose so at the start
"""

from baselines import LoopedLM, Pause, PonderLM1
from config import read_config
from model import PonderLM
from mor import ExpertChoice, TokenChoice

CLASSES = {
    name: kind
    for kind in (PonderLM, LoopedLM, Pause, PonderLM1, ExpertChoice, TokenChoice)
    for name in kind.methods
}
# What the name of a method says about a PonderConfig, beside `method`.
SETTINGS = {name: {} for name in CLASSES}
SETTINGS["vanilla"] = {"ponder_steps": 0}
SETTINGS["ponderlm2"] = {"router": "always", "iters": (2, 3)}


def build(config):
    """A new model of the method that config.method names, with random weights."""
    return CLASSES[config.method](config)


def load(directory):
    """The model of a directory of weights, whatever its method; see PonderLM.from_pretrained."""
    return CLASSES[read_config(directory).method].from_pretrained(directory)
