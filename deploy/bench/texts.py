"""The words of the benchmarks' prompts, written for this project."""

from typing import NamedTuple

ORDINARY: tuple[str, ...] = (
    "Write a short story about a lighthouse keeper who finds a letter that was posted forty years too late.",
    "Explain step by step how a bicycle stays upright while it is moving, and why it falls over when it stops.",
    "Describe a quiet morning in a mountain village in winter. Use all five senses and at least two paragraphs.",
    "My neighbour and I share a fence that leans further every year. She thinks that I should pay for a new "
    "one, and I believe that the roots of her walnut tree are to blame. We have been friends for a long time "
    "and I would like it to stay that way. Write a friendly letter in which I propose to split the cost, "
    "suggest that we look for two offers together, and leave her an easy way to say that she would rather "
    "solve it differently.",
    "Write a Python function that reads a text file and returns the ten most frequent words, then explain each line.",
    "Compare growing tomatoes in pots on a balcony with growing them in a garden bed. Cover water, soil and harvest.",
    "A train leaves at nine and travels at eighty kilometres an hour. Another leaves the same station an hour "
    "later on the same line and travels at one hundred and twenty. Reason aloud, step by step, about when and "
    "where the second train catches up with the first, and check the result at the end.",
    "Give a detailed plan for a weekend in a small town by the sea with two children and a dog. It will rain "
    "on Saturday afternoon, the older child hates museums, and dinner should not cost more than fifty for "
    "everybody together. Say for each part of the day where we are, what we do there, what we need to bring, "
    "and what we could do instead if something is closed. Put the plan into a list with times.",
    "What are the main differences between a virus and a bacterium, and why does that matter for medicine? "
    "Explain it to a patient who is annoyed that the doctor did not prescribe an antibiotic for a cold.",
    "Here is a function that is slower than it should be:\n"
    "\n"
    "def shared(first, second):\n"
    "    result = []\n"
    "    for item in first:\n"
    "        for other in second:\n"
    "            if item == other and item not in result:\n"
    "                result.append(item)\n"
    "    return result\n"
    "\n"
    "Explain why it becomes slow for long lists, rewrite it so that its time grows linearly with the length of "
    "the input, and say in which case the new version would behave differently from the old one.",
    "Write a speech of about two minutes for the retirement of a teacher who taught music for thirty-one "
    "years. She led the choir, saved the old piano from the rubbish twice, knew the name of every pupil, and "
    "never once raised her voice. She was also famous for losing her keys. The speaker is the head of the "
    "school, who was once her pupil and sang out of tune. The audience are colleagues, parents and about sixty "
    "children, so keep the jokes kind and the sentences short, and end with something that everybody can say "
    "together. Do not mention illness or money, and do not use quotations from famous people. The choir will "
    "sing right after the speech, so the last line should lead over to the first song, which is about setting "
    "out to sea.",
    "Explain how a compiler turns a loop into machine instructions. Write for a student in the first year.",
    "List eight ways to make a small kitchen easier to work in and say for each one what it would cost.",
    "Tell the story of the first day at work of a young baker, from the point of view of the oven.",
    "I have an interview on Thursday for a position as an assistant in a public library. I have worked in a "
    "bookshop for two years, I like talking to people, and I am nervous about questions on computers and "
    "catalogues. Write down six questions that I am likely to be asked and a good answer to each, in my own "
    "voice.",
    "Describe how rain forms, starting with the sun that warms the sea and ending with a drop on a window.",
    "Write an SQL schema for a small lending library with members, books and loans, and explain every table. A "
    "book can have several copies, a copy is lent to one member at a time, and a loan can be renewed twice.",
    "Argue first for and then against the idea that every town should ban cars from its centre.",
    "Write a dialogue between a patient gardener and a cloud that refuses to rain. Let the cloud give at least "
    "three reasons, and let the gardener find a kind answer to each of them.",
    "Summarise the following report in your own words and then list the three decisions that it asks for. The "
    "workshop used eleven percent more electricity than in the year before, although it was closed for two "
    "weeks in August. The compressor runs through the night because its valve leaks, the old lamps above the "
    "benches have not been replaced, and the new drying oven was often switched on with a single part inside. "
    "A repair of the valve costs four hundred, new lamps cost nine hundred, and a fuller oven costs nothing "
    "but patience. The team asks to decide by the end of the month.",
    "How does a seed know when to sprout? Explain what it measures and what happens inside it.",
    "Write a shell script that renames all photographs in a folder by the date on which they were taken, and "
    "describe what it does when two of them have the same date.",
    "Explain the rules of chess to somebody who has never seen a board, one piece at a time. Begin with the "
    "aim of the game, leave out castling at first, and end with the three ways in which a game can be drawn.",
    "Invent a new holiday that celebrates repairing things. Describe its history, its customs and its food, "
    "and how a school, a hospital and a family with little money would each spend that day.",
    "What should a beginner know before going on a hike of three days alone? Cover equipment, weather and safety.",
    "Think through this carefully: three friends share a taxi. The first leaves after a third of the way, the "
    "second after two thirds, and the third pays the driver sixty at the end. Explain two different fair ways "
    "to divide the fare, compute what everybody pays under each of them, and say which one you would choose.",
    "Write a product description for a wooden stool that is sold without a single screw. It is made of ash, "
    "weighs two kilograms, comes in four parts and carries one hundred and fifty. The buyers live in small "
    "flats and move often.",
    "Explain what a hash table is, how collisions are handled, and when a sorted tree is the better choice.",
)
"""Ordinary requests, of unequal length."""

PASSAGES: tuple[str, ...] = (
    "The ferry to the northern islands leaves at dawn, when fog still covers most of the harbour. Fishermen "
    "stack empty crates beside the ramp and argue about diesel prices. A woman with two goats boards first, "
    "followed by schoolteachers, a postman and seven tourists in yellow jackets. Once the engine starts, gulls "
    "rise from the breakwater and circle above the funnel. Halfway across, everyone falls silent, because "
    "dolphins swim alongside. Nobody takes photographs; it would seem rude. On arrival the captain blows his "
    "horn twice, and children run downhill to collect parcels, newspapers and fresh bread. By noon the quay "
    "belongs again to cats.",
    "To repair an old pendulum clock, begin by removing the weights and listening closely. Dust usually "
    "gathers around the escapement, where dried oil turns into something like glue. Clean every wheel using "
    "alcohol and a soft brush, then let them dry overnight on linen. Check whether any tooth is bent before "
    "putting plates together again. A drop of thin oil belongs at each pivot, never on the teeth themselves. "
    "Finally hang the case exactly upright, set the beat by ear, and resist opening the door for at least one "
    "week. Impatience has ruined more movements than rust, as any honest watchmaker will admit.",
    "Our village bakery sells eleven kinds of loaf, yet most customers ask for rye. Its dough rests sixteen "
    "hours in wooden troughs that were built by the grandfather of the present owner. Heat comes from beech "
    "logs, split during March and stored under a tin roof behind the chapel. Around four o'clock, bicycles "
    "line up along the wall while apprentices carry baskets outside. Rain changes nothing about this ritual. "
    "Whoever arrives after six must be content with rolls, gossip, or yesterday's plum cake sold at half "
    "price. Nobody has ever complained, least of all the sparrows under the bench.",
    "Glaciers move more like honey than like stone. Snow falling high above becomes ice under its own weight, "
    "bubbles are squeezed out, and blue light is all that escapes. Gravity drags this mass toward warmer "
    "valleys, grinding bedrock into flour so fine that rivers turn milky. Where slopes steepen, deep cracks "
    "open overnight with sounds resembling distant cannon fire. Surveyors plant stakes to measure speed; some "
    "travel forty metres each summer. At the snout, meltwater bursts from a cave, carrying boulders which no "
    "flood could otherwise lift. Sheep graze calmly nearby, unimpressed by ten thousand years of history.",
    "When Marta inherited the print shop, she found nine cases of lead type, three presses and a drawer full "
    "of unpaid bills. She kept the oldest machine, sold another to a museum, and gave the last one to her "
    "cousin in exchange for plumbing. Wedding cards paid the rent through autumn. In December a poet ordered "
    "two hundred booklets on grey paper, delivered the manuscript late, and insisted that commas be removed "
    "from page thirteen. Critics praised the design rather than the verse, which brought in orders from "
    "publishers abroad. Nowadays the shop employs five people and closes on Fridays.",
    "Packing a tent properly takes less time than searching for lost pegs. Shake out sand and leaves, wipe "
    "condensation off the fly, then fold the groundsheet lengthwise until it matches the bag. Poles go in the "
    "middle so that fabric protects them against knocks. Guy lines should be wound in figures of eight, never "
    "knotted, since knots tighten when wet. Keep spare cord, tape and one needle inside a tobacco tin. Back "
    "home, hang everything in an airy attic for several days, or mildew will write its own story across the "
    "seams. A dry shelter lasts decades.",
    "Bees judge distance by how quickly the ground streams past beneath them. Experiments with painted tunnels "
    "proved it: narrow stripes made foragers report journeys far longer than those they had flown. Inside the "
    "dark hive, a dancer waggles along the comb, and her angle against gravity mirrors the bearing of the "
    "sun. Followers touch her abdomen, taste samples and depart within minutes. Clouds hardly matter, because "
    "polarised patches betray where light originates. Such precision, packed into a brain lighter than a grain "
    "of salt, still humbles engineers. Many have tried to copy it, with mixed results.",
    "The committee met on Tuesday to discuss the footbridge near Miller's Pond. Engineers presented three "
    "proposals: replacing rotten planks, building a steel arch, or closing the crossing entirely. Parents "
    "objected to the last option, since pupils would need an additional twenty minutes every morning. Mr. "
    "Okafor calculated that galvanised beams cost only slightly more over thirty years. After coffee, members "
    "voted eight against two in favour of the arch, provided that anglers keep access to both banks. Work "
    "shall start once the nesting season ends, probably in late July. Until then a rope marks the weak boards.",
    "Salt was once carried over these hills on the backs of mules, forty animals to a train, each wearing a "
    "bell tuned differently so drivers could recognise it through mist. Inns along the route charged by the "
    "hoof. Smugglers preferred moonless nights and wrapped iron shoes in rags. Today hikers follow the same "
    "stones, polished smooth by centuries of traffic, without guessing why benches appear every two miles. "
    "Look under the chapel's porch: there you will find hooks where porters hung their loads while hearing "
    "mass. Three of them are original; thieves took the others in nineteen fifty.",
    "A good darkroom needs running water, a door that seals, and patience. Develop the film first, counting "
    "seconds aloud because clocks glow. Rinse, fix, rinse again; hang the strip from a clothes peg with a "
    "weight below. Next morning choose one frame, focus the enlarger on the grain itself, and expose a narrow "
    "test at five settings. Red light flatters everything, so judge contrast only outside. Beginners often "
    "blame chemicals for mistakes made with the lens. Experts simply throw more paper away and never mention "
    "it. Ask one about failures and the evening will be long, instructive and surprisingly cheerful.",
)
"""Passages of about 120 tokens in which no phrase comes twice: only copying makes them predictable."""


class Edit(NamedTuple):
    """A word of a passage, and another one for its place."""

    old: str
    new: str


EDITS: tuple[Edit, ...] = (
    Edit("diesel", "coffee"),
    Edit("alcohol", "vinegar"),
    Edit("rye", "spelt"),
    Edit("honey", "syrup"),
    Edit("Fridays", "Mondays"),
    Edit("tobacco", "biscuit"),
    Edit("salt", "sand"),
    Edit("Tuesday", "Thursday"),
    Edit("forty", "sixty"),
    Edit("Red", "Amber"),
)
"""One for each passage, in which the old word stands once, and not in the fourth sentence."""

ROLES: tuple[tuple[str, str], ...] = (
    (
        "You are Captain Ilse, who runs a small mail boat between foggy islands. You are gruff, fair and proud of your "
        "engine. Stay in character and speak in the first person.",
        "Captain, I have missed the last ferry and my sister marries at noon. Could you take me across?",
    ),
    (
        "You play the keeper of a dusty magic shop. You never lie, but you answer every question with a small warning.",
        "I am looking for a present for my grandmother. What is in that blue bottle on the top shelf?",
    ),
    (
        "Act as a detective who has retired to grow roses and would rather not take another case.",
        "Somebody has stolen all the left shoes in our village. Nobody but you can help us, inspector!",
    ),
    (
        "You are a very old robot that tends a library on the moon. Visitors are rare, and you are glad of each one.",
        "Hello? My ship has a broken pump, and your light was the only one that I could see from above.",
    ),
    (
        "Pretend to be a strict but kind riding teacher on the first day of the holidays.",
        "I have never sat on a horse, and honestly I am a little afraid of them. How do we begin?",
    ),
    (
        "You are the night clerk of a grand hotel in which something odd happens in every room.",
        "Good evening. There is a piano in my bath, and it is playing. I would like another room, please.",
    ),
    (
        "Be the mayor of a town of beavers. You are planning a dam and need everybody's vote, also that of the ducks.",
        "Mister mayor, we ducks have heard about the dam. What will become of our quiet little bay?",
    ),
    (
        "You are a patient ship's cook of the year 1720 who teaches the new cabin boy. You know nothing of later days.",
        "I have peeled all of the turnips, cook. What is for supper, and how do you keep the bread from the rats?",
    ),
)
"""Parts to play, and the first line that is spoken to them."""

TASKS: tuple[str, ...] = (
    "Write a Python class named {0.thing} with the attributes name and {0.value}, a constructor, a __repr__ method and "
    "a to_dict method. Only code.",
    "Write a Java class named {0.thing} with the private fields name and {0.value}, a constructor, getters and "
    "setters. Only code.",
    "Write a Python function named total_{0.value} that computes the sum of the {0.value} of all items of a list named "
    "items, with a docstring and an example call. Only code.",
)
"""Shapes of tasks: the answers to one of them are much alike, and none of their text stands in the request."""


class TaskWords(NamedTuple):
    """What makes one task of a shape differ from the next."""

    thing: str
    value: str


TASK_WORDS: tuple[TaskWords, ...] = (
    TaskWords("Boat", "length"),
    TaskWords("Ticket", "price"),
    TaskWords("Lamp", "height"),
    TaskWords("Bicycle", "weight"),
    TaskWords("House", "rent"),
    TaskWords("Garden", "width"),
    TaskWords("Parcel", "postage"),
    TaskWords("Teacher", "age"),
    TaskWords("River", "depth"),
    TaskWords("Camera", "zoom"),
    TaskWords("Recipe", "minutes"),
    TaskWords("Tunnel", "span"),
    TaskWords("Song", "tempo"),
    TaskWords("Planet", "radius"),
    TaskWords("Letter", "stamps"),
    TaskWords("Stove", "heat"),
)
"""As many as one run asks for."""
