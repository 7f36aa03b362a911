"""Every test that takes `place` runs once per backend and device at hand."""

import pytest
import torch

from tests.support.devices import Place, places

torch.set_num_threads(2)


@pytest.fixture(params=places(), ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    """A backend and its device."""
    return request.param
