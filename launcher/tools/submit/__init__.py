"""`shardscale submit`: check a training or a sweep, fill a batch script of slurm/, run sbatch.

python -m launcher submit --nodes 2 --gpus-per-node 8 --partition a100 --time 8:00:00 -- --zero 3
python -m launcher submit --sweep --gpus-per-node 4 -- --grid strategy=ddp,zero3 --model gpt2

In: options of sbatch, and the flags of what runs. Out: a job ID, or the script with --dry-run.
Checks flags through `launcher.config` and `launcher.compare.sweep`; trains nothing itself.
"""
