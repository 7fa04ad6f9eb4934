"""Limits that several rooms share. Plain numbers: importing them brings no library."""

# e^±20 is far outside any useful bound, and keeps a weight finite in fp32 and in bf16.
LOG_RATIO_CLAMP = 20.0
# exp(709.8) overflows float64; r or r² past e^700 counts as e^700, and any K3 threshold is far below it.
MAX_EXPONENT = 700.0
# A correction that keeps less than this share of the responses is warned of.
FEW = 0.5
