"""Word lists, names and numbers in words, from which the talk is made."""

from __future__ import annotations

import random


def _split(words: str) -> list[str]:
    return words.split()


FIRST_NAMES = _split(
    """
aaron abby adam adrian agnes ahmed aisha alan albert alex alice alina amber amir amy ana andrea andrew anita anna
annie anton april arthur astrid audrey ava axel barbara basil beatrix ben bella bernard beth bianca bill bob boris
brenda brian bruno caleb carla carlos carmen carol cecilia cesar chad chen chloe chris claire clara claude colin cora
craig cyrus daisy dana daniel daphne david dean deborah denise dennis derek diana diego dina dmitri dora dorothy doug
dylan edgar edith edward elena eli elias elisa ella ellen elliot elsa emil emily emma eric erik erin ernest esther
ethan eva evan eve fatima felix fiona flora frank fred frida gabriel gary george gerald gina glen grace greg greta
guido gustav hana hannah harold harry hassan hazel heidi helen henry hilda hugo ian ibrahim ida igor ilse ines ingrid
irene iris isaac isabel ivan ivy jack jacob jade james jamal jan jane jasmine jason jean jenny jerome jesse jill joan
joel john jonas jordan jose joseph judith jules julia june kai karen karl kate keiko keith kelly ken kevin kim klaus
kofi kurt kyle lars laura lea leah lena leo leon leona liam lila lily linda lisa liu lola lorenzo louis lucas lucia
lucy luis luke luna lydia mabel malik mara marco margo maria marie mario mark marta martin mary mateo matilda max maya
mei mia michael miguel mila milo mina mira mohamed molly mona monica morgan nadia naomi nathan neil nell nico nicole
nina noah noel nora norman oleg olga olive oliver omar oscar otto owen pablo pam patricia paul pavel pedro penny peter
petra phil philip piotr priya quentin quinn rachel raj ralph ramon raquel raul rebecca rex rita robert robin rosa rose
ruby rudy russell ruth ryan sally sam samir sandra sara sarah scott sean selma sergei shane sheila silas simon sofia
sonia stan stefan stella steve susan sven sylvia tanya tara ted teresa theo thomas tim tina toby todd tom tony tracy
ulla umar una ursula vera victor vikram viola violet wade walter wanda wendy will willa wolf xavier yara yasmin yuki
yusuf yvonne zach zelda zoe zora
"""
)

NOUNS = _split(
    """
acorn anchor angle apple arch arrow atlas autumn badge baker ball banjo bank barn basin basket beach bean bear beard
bell bench berry bicycle bird blanket boat bone book boot bottle bowl box branch bread brick bridge broom brush bucket
butter button cabin cabinet cable camel camera candle canyon carpet castle cat cave cedar cellar chain chair chalk
cheese cherry chess church circle city clay cliff clock cloud clover coast coat coffee comet compass copper coral
corner cottage cotton cousin cradle crane creek crow crown cup curtain dance desert desk diamond dinner dog doll door
dragon drawer dream dress drum duck dust eagle earth echo elbow ember engine evening eye falcon farm farmer feather
fence field finger fire fish flag flame flower flute forest fork fountain fox frog fruit garden garlic gate ghost
giant ginger glass globe glove goat gold goose grape grass guitar hammer harbor hat hawk hill honey hook horse hotel
house ice island ivory jacket jar jewel journey juice jungle kettle key king kitchen kite knee knife ladder lake lamp
lantern leaf lemon letter library light lily lion lizard lock magnet mango maple marble market mask meadow melon metal
milk mill mirror moon morning moss mountain mouse museum music nail needle nest night novel nut oak ocean office olive
onion orange orchard otter oven owl page paint palace paper park parrot path peach pebble pencil pepper piano picture
pig pillow pilot pine pirate planet plate plum pocket poem pond pony poplar pot prince puzzle queen rabbit radio rain
raven ribbon rice ring river road robot rocket roof room root rope sail sailor salmon salt sand saddle scarf school
sea seed shadow shark sheep shelf shell ship shirt shoe shop silver sister sky sleep smoke snail snake snow soap sock
song soup spider spoon spring square stable stamp star station stone storm story street sugar summer sun swan table
tailor tea temple tent thread tiger timber toast tomato tower town toy train tree trumpet tulip tunnel turtle umbrella
valley vase velvet village violin wagon wall walnut watch water wave wheel whistle willow wind window winter wizard
wolf wood wool yarn year zebra
"""
)

ADJECTIVES = _split(
    """
able amber ancient angry basic big bitter black blue bold brave bright broad brown busy calm careful cheap clean clear
clever cold common cool crisp curious damp dark deep dry dusty eager early easy empty equal fair famous fast final
fine flat fresh full funny gentle giant glad golden good grand gray great green happy hard heavy high hollow honest
huge humble hungry kind large late lazy light little lively local lonely long loud lucky mild modern narrow neat new
nice noble noisy odd old open orange pale patient plain polite proud purple quick quiet rapid rare ready red rich
rough round royal rusty sad safe sharp shiny short shy silent silver simple slow small smart smooth soft solid sour
steady steep strange strong sunny sweet swift tall tame tender thick thin tidy tiny tired ugly vast warm weak wet
white wide wild wise wooden yellow young
"""
)

PAST_VERBS = _split(
    """
accepted admired bought borrowed broke brought built called carried caught changed chased chose cleaned climbed closed
collected cooked counted covered crossed cut described drew dropped enjoyed explained fed filled finished fixed
followed forgot found gave greeted guarded heard held helped hid invented joined kept kicked knew left liked lifted
lost loved made measured mended met missed moved needed noticed offered opened ordered packed painted passed paid
picked planted played praised preferred prepared pulled pushed reached read repaired saved saw sent served shared
showed sketched sold stole studied taught threw told took touched traded trusted used visited wanted washed watched
wore wrote
"""
)

ADVERBS = _split(
    """
again almost already always badly barely boldly bravely calmly carefully easily early finally gently gladly happily
hardly lately loudly mostly nearly neatly never often once politely proudly quickly quietly rarely really sadly seldom
silently slowly softly soon still suddenly surely sweetly today tomorrow twice usually warmly well yesterday
"""
)

PLAIN_WORDS = _split(
    """
about above across after against along among and another any around because been before behind below between both but
came can come could does done down each else enough even ever every few for from get goes going gone had has have her
here him his how into its just last less let like many may might more most much must near next not now off only other
our out over own part past per put quite rather said same say seem set she should since some such than that the their
them then there these they thing think this those though through thus time together too toward under until upon very
was way were what when where which while who whole whose why with within without would yes yet you your number person
place point problem program question reason result science system world data model network memory cache server client
token window report paper meeting budget project team price list order plan
"""
)

LATIN_WORDS = _split(
    """
lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna
aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip ex ea commodo consequat duis aute
irure in reprehenderit voluptate velit esse cillum eu fugiat nulla pariatur excepteur sint occaecat cupidatat non
proident sunt culpa qui officia deserunt mollit anim id est laborum
"""
)

ALL_WORDS = sorted(set(NOUNS + ADJECTIVES + PAST_VERBS + ADVERBS + PLAIN_WORDS))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_KNOWN_NAMES = [name for name in FIRST_NAMES if 3 <= len(name) <= 8]
_WORD_NAMES = [word for word in ALL_WORDS if 3 <= len(word) <= 8]
_ONSETS = _split(
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn st t th tr v w y z"
)
_VOWELS = _split("a e i o u a e i o u ai ea ee ia io oa oo ou")
_CODAS = ["", "", "", "", *_split("b ck d f g k l ll m n nd nt p r rt s st t x")]
_UNITS = _split(
    """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
"""
)
_TENS = _split("twenty thirty forty fifty sixty seventy eighty ninety")


def number_in_words(number: int) -> str:
    """A whole number from 0 to 99 in English words, such as `forty-two`."""
    if number < 20:
        return _UNITS[number]
    tens = _TENS[number // 10 - 2]
    return tens if number % 10 == 0 else f"{tens}-{_UNITS[number % 10]}"


def pronounceable_name(rng: random.Random) -> str:
    """A made-up word of 3 to 8 letters that can be spoken."""
    name = ""
    length = rng.randint(3, 8)
    while len(name) < length:
        name += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    return name[:length]


def any_name(rng: random.Random) -> str:
    """A lower-case word of 3 to 8 letters: a first name, an English word, a made-up word or plain random letters."""
    draw = rng.random()
    if draw < 0.25:
        return rng.choice(_KNOWN_NAMES)
    if draw < 0.40:
        return rng.choice(_WORD_NAMES)
    if draw < 0.70:
        return pronounceable_name(rng)
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 8)))


def similar_name(rng: random.Random, name: str) -> str:
    """A name one letter away from `name`: changed, added, left out, or two neighbours swapped."""
    letters = list(name)
    place = rng.randrange(len(letters))
    draw = rng.random()
    if draw < 0.2 and len(letters) < 8:
        letters.insert(rng.randint(0, len(letters)), rng.choice(LETTERS))
    elif draw < 0.4 and len(letters) > 3:
        del letters[place]
    elif draw < 0.5 and place > 0:
        letters[place - 1], letters[place] = letters[place], letters[place - 1]
    else:
        letters[place] = rng.choice(LETTERS)
    return "".join(letters)


def any_code(rng: random.Random) -> str:
    """Four decimal digits as text; leading zeros are as likely as any other digit."""
    return f"{rng.randrange(10000):04d}"
