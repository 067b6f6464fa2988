"""What the quickstart decides before it starts: it looks at the images, measures the machine,
chooses and says why.
"""
