"""The words that the stories of the bundled model are told with."""

from typing import NamedTuple


def _list(text: str) -> tuple[str, ...]:
    """Return the items of a text that are separated by commas."""
    return tuple(" ".join(item.split()) for item in text.split(","))


class World(NamedTuple):
    """The surroundings of a hero: where to live, where to look, where things turn up, and who comes by."""

    homes: tuple[str, ...]
    spots: tuple[str, ...]
    finds: tuple[str, ...]
    helpers: tuple[str, ...]
    little_ones: tuple[str, ...]


LAND = World(
    homes=_list(
        "in a quiet forest, in a green valley, in a small village, in a town by a river, on a windy hill,"
        "near a deep lake, in a house with a blue door, at the edge of a big wood, on a farm,"
        "in a castle with seven towers, behind the mountains, in a garden full of roses, at the end of a long road,"
        "beside an old mill, on a little island, in a busy city, in a warm cave, next to a big meadow"
    ),
    spots=_list(
        "behind the door, under the stairs, behind the shed, in the tall grass, under the old bridge,"
        "behind a big stone, among the bushes, beside the well, under a pile of leaves, behind the fence,"
        "in the corner of the barn, under the apple tree, in the cellar, up in the attic"
    ),
    finds=_list(
        "at the foot of an old oak, beside the pond, in the middle of the meadow, behind the mill,"
        "at the edge of the forest, on the bank of the river, at the top of the hill, near the old stone wall,"
        "under a willow tree, beside the garden gate, on the path to the village, in front of the bakery"
    ),
    helpers=_list(
        "owl, beaver, hedgehog, tortoise, badger, deer, goose, raven, squirrel, stork, mole, toad, donkey, goat,"
        "swan, baker, gardener, miller, shepherd, postman, teacher, blacksmith, fisherman, grandmother, woodcutter,"
        "tailor"
    ),
    little_ones=_list("mouse, bird, kitten, puppy, rabbit, frog, chick, lamb"),
)
SEA = World(
    homes=_list(
        "deep in the blue sea, in a warm bay, near a coral reef, in a cave under the waves, beside a sunken ship,"
        "in a garden of seaweed"
    ),
    spots=_list(
        "behind the coral, under a flat rock, among the seaweed, in a dark cave, behind a big shell,"
        "inside the sunken ship"
    ),
    finds=_list(
        "on the soft sand, between two rocks, at the edge of the reef, beside the old anchor, in a bed of sea grass,"
        "at the mouth of the cave"
    ),
    helpers=_list("turtle, seal, lobster, sea horse, jellyfish, swordfish, starfish, pelican"),
    little_ones=_list("shrimp, snail, fish, crab"),
)
SKY = World(
    homes=_list("high up in the sky, far above the hills, over the wide sea, near the silver moon"),
    spots=_list("behind a rainbow, behind the moon, above the mountains, under a grey cloud, among the stars"),
    finds=_list("at the end of the rainbow, on top of the highest mountain, beside the evening star, near the moon"),
    helpers=_list("eagle, swallow, wild goose, lark, sunbeam"),
    little_ones=_list("sparrow, snowflake, raindrop, butterfly"),
)

# By pronoun; "any" takes either.
LAND_HEROES = {
    "any": _list(
        "fox, owl, rabbit, hare, bear, wolf, mouse, rat, cat, kitten, dog, puppy, pig, piglet, sheep, lamb, goat,"
        "horse, pony, donkey, duck, duckling, goose, chick, frog, toad, snail, turtle, tortoise, lizard, snake,"
        "worm, bee, ant, beetle, ladybird, butterfly, spider, caterpillar, grasshopper, hedgehog, badger, mole,"
        "squirrel, beaver, otter, deer, moose, raccoon, panda, monkey, lion, tiger, elephant, giraffe, zebra, hippo,"
        "camel, kangaroo, koala, crocodile, penguin, parrot, sparrow, crow, eagle, peacock, bat, dragon, unicorn,"
        "robot, monster, ghost, giant, dwarf, elf, troll, goblin, snowman, scarecrow, baker, farmer, gardener,"
        "doctor, teacher, painter, sailor, pirate, cook, tailor, clown, knight, inventor, astronaut, musician,"
        "shepherd, child, baby, dinosaur"
    ),
    "he": _list("boy, king, prince, wizard, grandfather, postman, fisherman, rooster, bull"),
    "she": _list("hen, cow, girl, queen, princess, witch, grandmother, fairy"),
}
SEA_HEROES = {
    "any": _list("fish, whale, dolphin, shark, octopus, crab, seal, lobster, sea horse, jellyfish, starfish"),
    "he": (),
    "she": ("mermaid",),
}
SKY_HEROES = {"any": _list("cloud, star, comet, raindrop, snowflake"), "he": (), "she": ()}

NAMES = {
    "he": _list(
        "Ben, Tom, Max, Leo, Sam, Finn, Oscar, Hugo, Felix, Jack, Otto, Milo, Theo, Noah, Paul, Emil, Toby, Henry,"
        "Charlie, Bruno, Rusty, Pip, Oliver, Arthur, Jasper, Simon, Walter, Albert, Nico, Gus"
    ),
    "she": _list(
        "Ruby, Mia, Lily, Anna, Emma, Rosa, Lucy, Daisy, Ella, Nora, Clara, Ida, Greta, Hazel, Ivy, Molly, Poppy,"
        "Stella, Tilda, Wanda, Alice, Flora, Olive, Penny, Sally, Martha, Betty, Maya, Luna, Zoe"
    ),
}

THINGS = _list(
    "key, ring, button, coin, marble, feather, shell, pebble, whistle, watch, spoon, needle, pencil, pen, crayon,"
    "brush, comb, bell, pearl, ribbon, glove, sock, mitten, hat, scarf, cap, boot, shoe, letter, map, book, card,"
    "ticket, stamp, doll, ball, flute, candle, cup, mug, teapot, plate, bowl, jar, bottle, mirror, compass, lantern,"
    "lamp, umbrella, basket, bag, box, backpack, blanket, pillow, coat, cloak, crown, medal, necklace, bracelet,"
    "toy, teddy bear, puzzle, magnet, hammer, bucket, shovel, rope, broom, clock, music box, treasure chest,"
    "magic wand, sword, shield, camera, telescope"
)
BUILDS = _list(
    "boat, raft, sled, cart, wagon, bicycle, scooter, kite, balloon, ladder, chair, table, bed, drum, piano, guitar,"
    "violin, trumpet, swing, tent, house, hut, bridge, tower, bench, wheel, rocket, sandcastle, tree house,"
    "birdhouse, machine, train"
)
FOODS = _list(
    "cake, pie, cookie, pancake, pizza, sandwich, muffin, bun, waffle, apple, pear, plum, carrot, egg, candy,banana"
)
PLANTS = _list(
    "seed, bean, acorn, rose, tulip, sunflower, pumpkin, flower, tree, cherry tree, apple tree, nut, strawberry,cactus"
)
FEARS = _list(
    "shadow, spider, ghost, monster, wave, bee, snake, storm, cave, mask, scarecrow, wolf, bear, mouse, dog, cat,"
    "well, the dark, the sea, the wind, the thunder, the rain, the night, the forest, the snow, the water, the moon"
)
ACTIVITIES = _list(
    "fly, swim, dance, sing, read, write, paint, cook, bake, skate, climb, juggle, whistle, ski, dive, draw, count,"
    "knit, sew, drum, jump, sail, surf, row, ride a bicycle, play the flute, play football, do magic, tell jokes"
)

THING_WORDS = _list(
    "red, blue, green, yellow, golden, silver, wooden, shiny, tiny, old, new, big, small, little, magic, pink,"
    "purple, white, black, strange, beautiful, round, special, colorful, favorite"
)
# Said of a hero without a sentence of their own in traits.py.
LOOKS = _list(
    "red, blue, green, purple, pink, white, black, brown, grey, golden, round, fluffy, striped, spotted, tall, thin,"
    "fat, pretty, beautiful, magic, strange, young, famous, wild, nice, good, fast, slow"
)

DAYS = _list(
    "one morning, one sunny morning, one rainy day, one windy day, one cold evening, one summer day, one day,"
    "one afternoon, on a warm spring day, on a grey Monday, one fine day, one quiet Sunday, one day in autumn,"
    "early one morning"
)
HELPER_WORDS = ("", "", "wise old", "friendly", "kind", "old", "cheerful", "clever", "gentle")

SYLLABLE_STARTS = _list(
    "b, bl, br, c, cl, d, dr, f, fl, g, gl, gr, h, j, k, kl, l, m, n, p, pl, pr, qu, r, s, sk, sl, sn, sp, st, sw,"
    "t, tr, tw, v, w, y, z, zw, th, sh, ch"
)
SYLLABLE_VOWELS = _list("a, e, i, o, u, oo, ee, ai, ou")
SYLLABLE_ENDS = _list(
    "b, bble, ck, d, ff, g, k, l, m, mp, n, ng, nk, p, r, rt, sh, t, th, x, zz, mmer, nder, bit, gle, lo, by"
)
