#!/bin/sh
# Runs any of Duet's scripts: `train ARGS` is `python train.py ARGS`, `data.pack ARGS` is `python -m data.pack ARGS`;
# any other command of the image (torchrun, tensorboard, python, sh) runs as it is.
set -eu
home=$(dirname "$(dirname "$(readlink -f "$0")")")
cd "$home"

scripts() {
    for script in *.py data/pack.py data/inspect.py; do
        name=$(echo "${script%.py}" | tr / .)
        [ ! -f "$script" ] || [ "$name" = hubconf ] || printf '%s ' "$name"
    done
}

name=${1:-help}
case $name in
help | -h | --help)
    echo "usage: docker run duet COMMAND [ARGS]; COMMAND is one of: $(scripts)"
    echo "every command has --help; data goes to /data, results to /runs"
    exit 0
    ;;
esac
shift

if [ -f "$name.py" ]; then
    exec python "$name.py" "$@"
elif [ -f "$(echo "$name" | tr . /).py" ]; then
    exec python -m "$name" "$@"
elif command -v "$name" >/dev/null; then
    exec "$name" "$@"
fi
echo "error: no command $name; take one of: $(scripts)" >&2
exit 2
