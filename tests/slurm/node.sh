# PID 1 of a node, in namespaces of its own inside the cluster's. node.sh NAME
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
slurmd -D -N "$1" &
while :; do wait -n || sleep 0.2; done
