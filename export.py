"""Write a network for use elsewhere: `python export.py --checkpoint runs/gan --format onnx --out
gan.onnx`.
"""

from duetgan.commands import run

if __name__ == "__main__":
    run("export")
