"""Limits that several packages share, as plain numbers: importing them loads no library."""

# e^±20 is far outside any useful bound, and keeps a weight finite in fp32 and in bf16.
LOG_RATIO_CLAMP = 20.0
# exp(709.8) overflows float64; r or r² past e^700 counts as e^700, and any K3 threshold is far below it.
MAX_EXPONENT = 700.0
# Below this share of kept responses, a correction gets a warning.
FEW = 0.5
