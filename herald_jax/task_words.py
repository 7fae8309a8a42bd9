"""The words that the evaluation tasks are made of: common English nouns, first names, cities and occupations."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    """
    acorn actor almond anchor angle apple apron arch arrow atlas autumn badge bakery balcony banjo bank barn
    barrel basin basket beach bead beam bear beaver bell belt bench berry bicycle bird blanket blossom boat bolt
    bone bonnet book boot border bottle boulder bowl box bracelet branch bread brick bridge broom brush bubble
    bucket buckle bush butter button cabin cable cactus cage cake calendar camel camera camp canal candle canoe
    canvas cape captain card carpet carrot cart castle cave cedar cello chain chair chalk chapel cheese cherry
    chest chimney circle clay cliff clock cloud clover coach coal coast coat coin comb compass copper coral cork
    corner cottage cotton cradle crane crater crayon creek cricket crown crystal curtain cushion dagger daisy
    dance deer desert desk diamond dish dock dolphin donkey door dragon drawer drum duck eagle easel elbow
    elephant emerald engine envelope fabric falcon farm feather fence ferry fiddle field finger fire flag flame
    flower flute forest fork fountain fox frame frog fruit funnel furnace galaxy gallery garden garlic garnet
    gate ginger glacier glass globe glove goat goose grape grass guitar hammer hammock harbor harp harvest hat
    hawk hedge helmet hill hinge honey hook horn horse hotel house island ivory jacket jar jewel jungle kettle
    key kitchen kite knife knot ladder lake lamp lantern lawn leaf lemon lens leopard letter library lily lion
    lizard lobby lock log lotus magnet mango map maple marble market mask meadow medal melon mill mint mirror
    mitten monkey moon moose morning mosaic moss mountain mouse museum needle nest net night oak oasis ocean
    olive onion orange orchard otter oven owl oyster paddle page palace panda paper park parrot path peach pearl
    pebble pelican pencil pepper piano picture pigeon pillow pine pirate pitcher planet plate plum pocket pond
    poppy postcard potato prairie puzzle quarry quilt rabbit radio railway rain raven ribbon rice ring river
    road robin rocket roof root rope rose ruby saddle sail salmon salt sand sandal saw scarf school seal seed
    shadow shawl sheep shelf shell shield ship shirt shoe shore shovel silk silver skate sleeve snail snow soap
    sock spark sparrow spider sponge spoon spring square stable star statue stone stool storm stove straw stream
    street sugar summer sunset swan table tailor teapot temple tent thimble thread throne thunder ticket tiger
    timber toast tomato torch tower toy train tree trumpet tulip tunnel turkey turtle umbrella valley vase
    velvet village vine violet violin wagon wallet walnut water wave whale wheat wheel whistle willow window
    winter wolf wood wool yard zebra
    """
)

NAMES = _words(
    """
    Ada Alan Alice Amir Anna Arthur Astrid Ben Bianca Boris Bruno Carla Carmen Cedric Clara Colin Daisy Daniel
    David Diana Edgar Edith Elena Elias Emil Emma Erik Esther Eva Felix Fiona Flora Frank Freya George Gloria
    Grace Greta Gustav Hanna Harold Hector Helen Henry Hugo Ida Igor Ines Irene Isaac Ivan Jack Jana Jasper Joan
    Jonas Julia Karim Karl Kate Laura Leila Lena Leo Lewis Linda Louis Lucy Luna Magda Marco Maria Martin Max
    Maya Mila Mina Nadia Nina Nora Olga Oliver Oscar Otto Paula Peter Petra Philip Quentin Ralph Rita Robert
    Rosa Ruth Samuel Sara Simon Sofia Stella Tara Theo Thomas Tina Ursula Vera Victor Walter Wanda William Yara
    Zoe
    """
)

CITIES = _words(
    """
    Accra Amsterdam Athens Baghdad Bangkok Barcelona Belgrade Berlin Bogota Boston Brussels Bucharest Budapest
    Cairo Caracas Chicago Copenhagen Dakar Damascus Delhi Denver Dublin Florence Geneva Glasgow Hamburg Hanoi
    Havana Helsinki Istanbul Jakarta Kabul Karachi Kiev Kyoto Lagos Lima Lisbon London Lyon Madrid Manila
    Marseille Melbourne Milan Montreal Moscow Munich Nairobi Naples Oslo Ottawa Oxford Paris Prague Riga Rome
    Santiago Seoul Seville Shanghai Sofia Stockholm Sydney Tallinn Tokyo Toronto Tunis Turin Vancouver Venice
    Vienna Vilnius Warsaw Zagreb Zurich
    """
)

JOBS = _words(
    """
    architect baker banker barber blacksmith bookbinder botanist builder butcher carpenter chemist clerk
    composer cook dancer dentist designer diver doctor driver editor engineer farmer fisherman gardener
    geologist glazier hunter jeweller judge lawyer librarian locksmith mason mechanic miller miner musician
    notary nurse optician painter pharmacist pilot plumber poet porter postman potter printer sailor sculptor
    shepherd singer surgeon surveyor tailor teacher translator weaver writer
    """
)

ANIMALS = _words(
    """
    beaver camel canary cat chicken crow dog donkey duck eagle falcon ferret fox goat goose hamster hedgehog
    horse iguana lizard llama monkey mouse otter owl parrot peacock pigeon pony rabbit raven sheep snail snake
    spider squirrel swan tortoise turkey turtle
    """
)
