"""`shardscale submit`: fill a batch script of slurm/, check what can be checked, give it to sbatch.

python -m launcher submit --nodes 2 --gpus-per-node 8 --partition a100 --time 8:00:00 -- --zero 3
python -m launcher submit --sweep --gpus-per-node 4 -- --grid strategy=ddp,zero3 --model gpt2
"""
