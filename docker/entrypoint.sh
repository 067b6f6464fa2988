#!/bin/sh
# Runs a command of Duet: `train ARGS` is `python train.py ARGS`, `pack ARGS` is `duet pack ARGS`; any other command of
# the image (torchrun, tensorboard, python, sh) runs as it is.
set -eu
home=$(dirname "$(dirname "$(readlink -f "$0")")")
cd "$home"

name=${1:-help}
case $name in
help | -h | --help)
    echo "data goes to /data, results to /runs"
    exec python -m duetgan --help
    ;;
esac

if [ -f "$name.py" ]; then
    shift
    exec python "$name.py" "$@"
elif [ -f "$(echo "$name" | tr . /).py" ]; then # data.pack
    shift
    exec python -m "$name" "$@"
elif [ ! -f "duetgan/commands/$name.py" ] && command -v "$name" >/dev/null; then
    exec "$@"
fi
exec python -m duetgan "$@"
