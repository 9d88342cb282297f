"""The prompts that `paceline distill` asks by default: tasks of many kinds, each about many things, as chance has it.

A small model's drafter needs breadth more than depth: that nothing is asked twice in the same words.
"""

from collections.abc import Iterator, Sequence
from random import Random

import msgspec


class Asked(msgspec.Struct, frozen=True):
    """A message of a user, and what the system said before it, if anything."""

    user: str
    system: str = ""


_WRITING = (
    "Write a short story about {thing}.",
    "Write a poem about {thing}.",
    "Write a blog post about {thing} for people who have never heard of it.",
    "Write a letter to a friend in which you tell about {thing}.",
    "Write a product description for {thing}.",
    "Write the opening paragraph of a novel in which {thing} matters.",
    "Write a short dialogue between two strangers about {thing}.",
    "Write a speech of one minute about {thing}.",
    "Write a news report about {thing}.",
    "Draft an email to a colleague about {thing}. Keep it polite and brief.",
    "Write a scene for the stage in which {thing} goes wrong.",
    "Write a children's story about {thing} with a happy ending.",
    "Describe {thing} so that somebody who cannot see it can picture it.",
    "Write an advertisement for {thing} that makes people smile.",
    "Write a diary entry of somebody who has just discovered {thing}.",
    "Tell me a joke about {thing}, then explain why it is funny.",
    "Write a review of {thing}, first the good and then the bad.",
    "Compose a short song about {thing} with two verses and a refrain.",
    "Write a monologue of {thing}, as if it could speak.",
    "Write an invitation to an evening about {thing}.",
)
_EXPLAINING = (
    "Explain {thing} to a child of ten.",
    "Explain {thing} in simple words.",
    "What is {thing}, and why does it matter?",
    "What are the main advantages and disadvantages of {thing}?",
    "How did {thing} change over the last hundred years?",
    "What do most people get wrong about {thing}?",
    "Give me five interesting facts about {thing}.",
    "Summarise what is known about {thing} in three sentences.",
    "Why do people care about {thing}?",
    "What would the world be like without {thing}?",
    "Which questions about {thing} are still open?",
    "How does {thing} work, step by step?",
    "What is the history of {thing}?",
    "Compare {thing} with {other}.",
    "What have {thing} and {other} in common?",
    "Discuss {thing} from the point of view of an economist and of a historian.",
    "Who was important for {thing}, and what did they do?",
    "What terms should I know before I read about {thing}? Explain each in a sentence.",
)
_ADVISING = (
    "I want to learn about {thing}. Where should I start?",
    "Give me a plan for a week in which I learn the basics of {thing}.",
    "My friend is afraid of {thing}. What can I say to help?",
    "How can I talk with my family about {thing} without a quarrel?",
    "List ten ideas for a project about {thing}.",
    "What should I pay attention to when I spend money on {thing}?",
    "Make a checklist for somebody who begins with {thing}.",
    "I have an exam about {thing} tomorrow. What should I revise tonight?",
    "Suggest three titles for an article about {thing}, and say which one is best.",
    "What equipment does one need for {thing}, and what does it cost about?",
    "Which mistakes do beginners make with {thing}?",
    "How can a small company make use of {thing}?",
    "Write six questions for an interview with an expert on {thing}.",
    "Give me tips for teaching {thing} to adults.",
    "Design a game for a rainy day around {thing}.",
)
_REASONING = (
    "Argue for and against {thing}, then say what you think.",
    "Is {thing} overrated? Give reasons.",
    "What could go wrong with {thing}, and how could one prevent it?",
    "Think step by step: what would happen if everybody gave up {thing}?",
    "Name three causes and three effects of {thing}.",
    "Make a table that compares {thing} and {other} in five respects.",
    "Write a short quiz of five questions about {thing}, with answers.",
    "Sort these by how important they are for {thing}: money, time, luck, practice. Explain.",
    "Rewrite this sentence in three different ways: I never thought that {thing} could be so much fun.",
    "Correct the grammar: him and me was talking of {thing} since two hours and nobody don't listened.",
    "Translate into French: We have learned a lot about {thing} today.",
    "Translate into Spanish: My sister is more interested in {thing} than in {other}.",
    "Give the keywords of a text about {thing}, separated by commas.",
    "Answer in one sentence: what does {thing} have to do with {other}?",
)
_THINGS = (
    "the sea", "a lighthouse", "bees", "coffee", "climate change", "volcanoes", "the moon", "a lost key", "jazz",
    "public libraries", "bicycles", "chess", "artificial intelligence", "a village market", "bread", "vaccines",
    "sleep", "the Roman Empire", "gravity", "photosynthesis", "electric cars", "inflation", "friendship",
    "a broken clock", "football", "the human heart", "recycling", "black holes", "tea", "a haunted house",
    "migration of birds", "learning a language", "the printing press", "solar power", "gardening", "dreams",
    "the stock market", "a train journey", "democracy", "the Great Wall of China", "painting", "bacteria",
    "a school reunion", "robots", "wolves", "patience", "the Industrial Revolution", "cooking for guests",
    "earthquakes", "a first job", "social media", "mathematics", "the Olympic Games", "loneliness", "rivers",
    "a secret recipe", "the internet", "dinosaurs", "meditation", "traffic", "a small bakery",
    "the French Revolution", "nuclear energy", "cats", "moving to another country", "quantum computers", "honesty",
    "the desert", "a museum at night", "hiking", "blockchain", "old photographs", "the brain", "rain", "opera",
    "remote work", "a wedding", "antibiotics", "street music", "tourism", "whales", "a time machine", "the Silk Road",
    "video games", "budgeting", "poetry", "a storm", "fermentation", "justice", "space travel", "a neighbour's dog",
    "the periodic table", "fashion", "glaciers", "yoga", "a detective", "plastic", "the Renaissance", "running",
    "fear", "supply and demand", "owls", "a mountain hut", "genetics", "theatre", "the Amazon rainforest",
    "a birthday party", "insurance", "chocolate", "magnets", "homework", "forgiveness", "the Second World War",
    "a robot that paints", "local elections", "mushrooms", "swimming", "the theory of evolution", "a lonely island",
    "spices", "drones", "the immune system", "knitting", "ancient Egypt", "public transport", "a talking tree",
    "ethics", "coral reefs", "fire", "a violin", "astronomy", "procrastination", "comets", "a food truck",
    "electricity", "grandparents", "winter", "start-ups", "the alphabet", "camping", "privacy", "a circus",
    "diabetes", "bridges", "silence", "comic books",
)  # fmt: skip
_CODE = (
    "Write a Python function that {job}.",
    "Write a JavaScript function that {job}, and show how to call it.",
    "How can I write a program that {job}? Explain the idea first, then give the code.",
    "Write a Python function that {job}. Add type hints, a docstring and two tests.",
    "Explain how an algorithm that {job} works, and how long it takes for large inputs.",
    "Write a small class in Java that {job}.",
    "Write a function in C that {job}.",
)
_JOBS = (
    "reverses the words of a sentence", "finds the largest number in a list", "counts the vowels in a text",
    "checks whether a word is a palindrome", "removes duplicates from a list", "sorts names by their last letter",
    "computes the factorial of a number", "merges two sorted lists", "reads a CSV file and sums a column",
    "converts temperatures between Celsius and Fahrenheit", "finds all prime numbers below a limit",
    "counts how often each word occurs in a file", "checks whether brackets are balanced",
    "draws a triangle of stars", "finds the shortest path in a grid", "rolls dice and prints the average",
    "validates an email address", "splits a list into chunks of equal size", "computes the nth Fibonacci number",
    "rotates a matrix", "finds the missing number in a sequence", "downloads a page and prints its title",
    "keeps a list of tasks", "caches the results of a slow function",
    "parses a date and says which day of the week it is", "encrypts a text with a Caesar cipher",
    "implements a stack", "implements a queue with two stacks", "searches a sorted list by halving it",
    "groups words that are anagrams of each other", "plays tic-tac-toe", "converts a number to Roman numerals",
    "computes the distance of two points", "renames all files in a folder", "finds the longest word in a text",
    "transposes a table", "flattens nested lists", "simulates a bank account",
)  # fmt: skip
_SUMS = (
    "{name} buys {a} {goods} at {b} dollars each and pays with a note of {c} dollars. How much change is there?",
    "{name} reads {a} pages a day. How long does a book of {c} pages take? Show how you calculate.",
    "A train goes {c} kilometres in {b} hours. How fast is it? Explain step by step.",
    "{name} has {c} {goods} and gives away {a} of them each day for {b} days. How many are left?",
    "What is {a} times {c} plus {b}? Think step by step.",
    "A garden is {a} metres long and {b} metres wide. What are its area and its perimeter?",
    "{name} earns {c} dollars a week and saves {a} per cent of it. How much is that after {b} weeks?",
    "If {a} workers need {b} days to paint a house, how long do {c} workers need? State what you assume.",
    "Solve for x: {a}x + {b} = {c}.",
    "A recipe for {b} people needs {c} grams of flour. How much does one need for {a} people?",
)
_NAMES = ("Anna", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mei")
_GOODS = ("apples", "pencils", "tickets", "eggs", "books", "stamps", "cups", "flowers", "marbles", "batteries")
_PARTS = (
    "You are a pirate who has retired and runs a tea shop.",
    "You are a strict but kind teacher of mathematics.",
    "You are a doctor who explains things calmly.",
    "You are a travel guide who knows every small town.",
    "You are a poet who answers in few words.",
    "You are a chef with forty years of experience.",
    "You are a detective of the nineteen-thirties.",
    "You are a helpful assistant. Answer briefly.",
    "You are a robot who tries to understand people.",
    "You are a historian with a sense of humour.",
    "You are a software engineer who reviews a junior's work.",
    "You are a gardener who talks to plants.",
    "You are a wizard's apprentice on your first day.",
    "You are a lawyer who avoids long words.",
    "You are a coach who believes in everybody.",
    "You are a journalist who asks more than you answer.",
)
_LINES = (
    "Tell me about {thing}.",
    "What do you think of {thing}?",
    "I have a problem with {thing}. Can you help me?",
    "Do you remember the first time that you came across {thing}?",
    "Convince me that {thing} is worth my time.",
    "What would you never do when it comes to {thing}?",
    "Good morning! I heard that you know something about {thing}.",
    "Can you recommend something about {thing}?",
)


def training_prompts(seed: int) -> Iterator[Asked]:
    """Endlessly; the same ones for the same seed. Of the first thousands few come twice, mostly about code."""
    chance = Random(seed)  # noqa: S311 (nothing is kept secret by it)
    while True:
        yield _one(chance)


def _one(chance: Random) -> Asked:
    kind = chance.random()
    if kind < 0.12:
        return Asked(chance.choice(_CODE).format(job=chance.choice(_JOBS)))
    if kind < 0.22:
        return Asked(_sum(chance))
    if kind < 0.37:
        return Asked(_about(chance, _LINES), chance.choice(_PARTS))
    return Asked(_about(chance, chance.choice((_WRITING, _EXPLAINING, _ADVISING, _REASONING))))


def _about(chance: Random, tasks: Sequence[str]) -> str:
    thing, other = chance.sample(_THINGS, 2)
    return chance.choice(tasks).format(thing=thing, other=other)


def _sum(chance: Random) -> str:
    numbers = {"a": chance.randint(2, 40), "b": chance.randint(2, 12), "c": chance.randint(50, 900)}
    return chance.choice(_SUMS).format(name=chance.choice(_NAMES), goods=chance.choice(_GOODS), **numbers)
