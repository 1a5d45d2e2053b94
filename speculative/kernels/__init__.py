"""Machine code of our own, where what XLA makes falls well short of the hardware: see `product`."""
