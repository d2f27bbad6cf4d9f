"""Studies: one question each, asked of real measurements, answered in JSON first and in a page rendered from it.

``orders`` asks what kernel and normaliser do to a language model's loss, ``recall`` how much a state can remember,
``cost`` where one form becomes cheaper than another. ``records`` holds what they write, ``report`` renders it.
"""
