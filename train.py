"""Train a GAN or a classifier: `python train.py --config configs/quickstart_gan.yaml`. The same
command resumes.
"""

from duetgan.commands import run

if __name__ == "__main__":
    run("train")
