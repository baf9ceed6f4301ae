"""`shardscale plan --rent`: which GPUs to rent for a model and a number of tokens.

In: the flags of a plan, and a file of prices. Out: GPUs and counts by cost, with hours and energy,
as ranges. Knows the planner; prices are data, with their source and date.
"""
