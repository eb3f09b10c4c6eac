"""What this machine can measure and how well: short checks, each with one finding, see
leanbench.doctor.checks.
"""
