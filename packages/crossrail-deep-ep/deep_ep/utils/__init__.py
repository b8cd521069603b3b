"""What programs import from `deep_ep.utils`."""

from crossrail.deep_ep.utils import *  # noqa: F403
from crossrail.deep_ep.utils import __all__  # noqa: F401
