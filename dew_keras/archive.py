"""placeholder"""


def open_weights_entry(path): ...
