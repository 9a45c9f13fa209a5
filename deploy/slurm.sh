#!/usr/bin/env bash
# A training job on Slurm with the data service on the GPU hosts themselves.
#
#   sbatch deploy/slurm.sh job.yaml train.py [arguments of train.py ..]
#
# On every node: Ray on the cores that training leaves idle (the sidecar: constructor host and loader hosts), and
# torchrun with all GPUs. On the first node also Ray's head and `overlord serve`. Trainers find the service in
# $OVERLORD_ADDRESS and need no Ray. README.md beside this file says what to change.
#
#SBATCH --job-name=overlord-training
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
# After a preemption or a lost node the job is queued again under its number, and its log goes on in the same file.
#SBATCH --requeue
#SBATCH --open-mode=append
# This shell (B:) hears of the time limit three minutes ahead: time for training to save itself.
#SBATCH --signal=B:USR1@180

set -euo pipefail

if [ "$#" -lt 2 ]; then
  echo "usage: sbatch deploy/slurm.sh JOB TRAINER [ARGUMENT ..]" >&2
  exit 2
fi
job=$1
shift

# What you may set. `export` it before sbatch: the option --export=.. would cut a mesh at its commas.
gpus=${OVERLORD_RANKS_PER_HOST:-8}
mesh=${OVERLORD_MESH:-dp=$((SLURM_JOB_NUM_NODES * gpus))}
cpus=${OVERLORD_CPUS:-32}                       # cores of each node for the service
object_store=${OVERLORD_OBJECT_STORE:-17179869184}  # bytes of /dev/shm for what loaders send to other hosts
shared=${OVERLORD_SHARED:-$PWD/overlord-run}    # a folder on a file system that all nodes see
patience=${OVERLORD_PATIENCE:-900}              # seconds for Ray, then for the service, to come up
look_every=${OVERLORD_LOOK_EVERY:-5}            # seconds between two looks at what runs
port=6379

umask 077                                       # what is made here is for this user alone
# Whoever else can write to the folder could give the trainers the address of another service.
mkdir -p "$shared"
if [ ! -O "$shared/." ] || [ -n "$(find -L "$shared" -maxdepth 0 -perm /022)" ]; then
  echo "$shared belongs to another user, or others can write to it. Set OVERLORD_SHARED to a folder of yours that" \
    "only you can write to (chmod go-w)." >&2
  exit 2
fi
store=$shared/store
# A job that is queued again keeps its number: the count of restarts tells this attempt's file from an old one.
address_file=$shared/address-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$store"
rm -f "$address_file"

# The address that trainers get is a path, so TMPDIR must be the same on all nodes, and short: the kernel takes no
# socket with a path of more than 107 bytes. A folder of its own, so that all of it can go at the end. Its name cannot be
# guessed, and one of another user is not taken: all users can write to /tmp.
TMPDIR=/tmp/overlord-$SLURM_JOB_ID-$(od -An -N6 -tx1 /dev/urandom | tr -d ' \n')
export TMPDIR
unset RAY_TMPDIR                                # else Ray would put its session somewhere else, and leave it there
take_folder='mkdir -m 700 "$TMPDIR" 2>/dev/null || { [ ! -L "$TMPDIR" ] && [ -O "$TMPDIR" ] && '
take_folder+='[ "$(stat -c %a "$TMPDIR")" = 700 ]; } || { echo "$TMPDIR is not ours alone" >&2; exit 1; }'
eval "$take_folder"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Slurm runs this script on the first node. Its address, not its name: many hosts call themselves 127.0.0.1.
master=${OVERLORD_MASTER_IP:-$(hostname -I | cut -d' ' -f1)}
export RAY_ADDRESS=$master:$port                # what `--address auto` finds
# Whoever reaches Ray's port may run code as you: only who knows this word may. New for each attempt, and given to the
# steps of this job in their environment, so that it lies in no file.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

ray_steps=()
serve=
trainers=
again=

say() { echo "$(date +%T) $*" >&2; }
running() { [ -n "$1" ] && kill -0 "$1" 2>/dev/null; }
# In the background: a signal ends `wait` at once, and would have to wait for a `sleep` in front.
pause() { sleep "$look_every" & wait $!; }

end() {
  if running "$1"; then
    kill -TERM "$1" 2>/dev/null || true         # it may end by itself in between
    wait "$1" || true
  fi
}

# Readers before data, data before what carries it. Runs however this script ends.
clean_up() {
  code=$?
  trap '' TERM INT USR1                         # a second signal must not cut this short
  say "stopping (exit code $code)"
  end "$trainers"
  end "$serve"                                  # writes what it must to the store
  for step in "${ray_steps[@]}"; do end "$step"; done
  rm -f "$address_file"
  srun --overlap --nodes="${#nodes[@]}" --ntasks-per-node=1 rm -rf "$TMPDIR" || true  # a lost node cannot be cleaned
  if [ -n "$again" ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # last: it ends this script
  exit "$code"
}
trap clean_up EXIT
trap 'exit 143' TERM INT                        # scancel, or a preemption: then Slurm queues the job again by itself
trap 'again=yes; exit 0' USR1                   # the time limit is near: Slurm would not queue the job again for that

# Ends the job if a part of the service is gone: trainers would wait for data for ever.
check_service() {
  for step in "${ray_steps[@]}"; do
    if ! running "$step"; then say "Ray ended on a node"; exit 1; fi
  done
  if [ -n "$serve" ] && ! running "$serve"; then say "the service ended before the trainers"; exit 1; fi
}

# --overlap: Ray, the service and the trainers share the nodes of one allocation; without it the second step would
# wait for the first to end. --num-gpus=0: the GPUs are the trainers'. overlord_trainer tells the service which Ray
# nodes are trainer hosts. --block keeps the step alive as long as Ray.
start_ray() {
  node=$1
  shift
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --cpus-per-task="$cpus" \
    bash -c "$take_folder"'; exec "$@"' ray-step \
    ray start "$@" --num-cpus="$cpus" --num-gpus=0 --object-store-memory="$object_store" \
    --resources='{"overlord_trainer": 1}' --disable-usage-stats --block &
  ray_steps+=("$!")
}

# With a limit, since a signal to this shell waits for it.
hosts_in() {
  timeout 30 python -c 'import ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(int(ray.cluster_resources().get("overlord_trainer", 0)))' 2>/dev/null || echo 0  # Ray's head is not up yet
}

say "Ray on ${#nodes[@]} nodes, its head on ${nodes[0]} ($master)"
start_ray "${nodes[0]}" --head --node-ip-address="$master" --port="$port" --include-dashboard=false
for node in "${nodes[@]:1}"; do start_ray "$node" --address="$RAY_ADDRESS"; done
SECONDS=0
until found=$(hosts_in) && [ "$found" -ge "${#nodes[@]}" ]; do
  check_service
  if [ "$SECONDS" -ge "$patience" ]; then say "$found of ${#nodes[@]} nodes came up in $SECONDS s"; exit 1; fi
  pause
done

# --resume refuses an empty store, and without it a store that holds a run is set aside.
resume=()
if compgen -G "$store/lineage-*/snapshot-*.json" >/dev/null; then resume=(--resume); fi
say "the service of $job, mesh $mesh ${resume[*]}"
overlord serve "$job" --mesh "$mesh" --runtime ray --address auto --ranks-per-host "$gpus" \
  --store "$store" --cache "$shared/cache" --address-file "$address_file" "${resume[@]}" &
serve=$!
SECONDS=0
until [ -s "$address_file" ]; do
  check_service
  if [ "$SECONDS" -ge "$patience" ]; then say "the service did not come up in $SECONDS s"; exit 1; fi
  pause
done
OVERLORD_ADDRESS=$(cat "$address_file")
export OVERLORD_ADDRESS

# Node ranks by Slurm's numbers, not by who comes first: a run that is queued again on the same nodes looks the same.
# In single quotes, because SLURM_NODEID is known on the node only.
say "trainers at $OVERLORD_ADDRESS"
# shellcheck disable=SC2016
srun --overlap --nodes="${#nodes[@]}" --ntasks-per-node=1 --cpus-per-task="$((SLURM_CPUS_PER_TASK - cpus))" \
  --kill-on-bad-exit=1 bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \
  --nnodes "${#nodes[@]}" --nproc-per-node "$gpus" --master-addr "$master" --master-port 29500 "$@" &
trainers=$!
while running "$trainers"; do
  check_service
  pause
done
wait "$trainers"                                # its exit code is the job's
say "done"
