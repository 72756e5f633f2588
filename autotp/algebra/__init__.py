"""How a dim is named, split and placed: pure arithmetic, without torch and without ops."""
