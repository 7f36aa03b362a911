"""Two workers on two cores: one torch thread each."""

import torch

torch.set_num_threads(1)
