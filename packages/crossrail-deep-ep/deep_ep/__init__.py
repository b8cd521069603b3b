"""`crossrail.deep_ep` under the name that programs written for DeepEP import."""

from deep_ep._only import refuse_another

refuse_another()

from crossrail.deep_ep import *  # noqa: E402, F403
from crossrail.deep_ep import __all__, __getattr__, __version__  # noqa: E402, F401
