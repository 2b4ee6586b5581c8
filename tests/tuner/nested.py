"""A model with two layers of which one's name ends as the other's."""

import torch


class Nested(torch.nn.Module):
    """`lin` is the end of another layer's name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = torch.nn.Linear(32, 32)
        self.block = torch.nn.Module()
        self.block.lin = torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.block.lin(self.lin(x))
