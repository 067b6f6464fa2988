"""What all of them need and none of them owns. Every script imports it first, so here it begins to hear Ctrl-C."""

from duetgan.utils.script import hear_interrupts

hear_interrupts()
