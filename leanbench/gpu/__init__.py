"""What a GPU is: the catalogue of known ones, and NVML for the one that is here."""
