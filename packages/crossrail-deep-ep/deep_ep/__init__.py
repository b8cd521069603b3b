"""`crossrail.deep_ep` under the name that programs written for DeepEP import."""

from crossrail._drop_in import refuse_another

refuse_another("deep_ep", __file__, ["deep_ep"], ["deep_ep_cpp"])

from crossrail.deep_ep import *  # noqa: E402, F403
from crossrail.deep_ep import __all__, __getattr__, __version__  # noqa: E402, F401
