"""Shared set-up. pytest puts this folder on ``sys.path``: helpers are imported by their name."""

import torch
import transformers
from hypothesis import settings

torch.set_num_threads(1)  # the models here are tiny: more threads only wait for each other
transformers.utils.logging.set_verbosity_error()
settings.register_profile("slipstream", deadline=None, derandomize=True, database=None)
settings.load_profile("slipstream")
