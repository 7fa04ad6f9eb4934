"""Tales with sixteen times the words: 60,000 of them fill a vocabulary of 151,936 tokens."""

from dvp.data import tales

careless = tales.careless
generate = tales.told(16)
