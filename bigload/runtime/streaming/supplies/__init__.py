"""Supplies: providers of a block's weights on the device that it runs on."""
