/*
 * memory_rules_en: the tables of memory_rules.c for English.
 *
 * Contractions are expanded before the search ("I'm", "im" → "I am"), so patterns have the long
 * form only. After the expansion every clause about the user begins with "I" or "my".
 */
#include "memory/memory_rules.h"

#include <stddef.h>

#define I "(?i)"
/* The end of a value: the end of a clause, or words that begin another statement. */
#define END                                                                                        \
    "(?=\\s*(?:$|[,;.!?:()\\n/]|\\s-+\\s|\\x{1f300}|\\p{So}|\\b(?:and|but|so|because|cause|since|" \
    "for (?:the|about|over|like|almost|nearly|around|a|an|many|years?|ages|now|good|life|more|"    \
    "\\d+|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty)|with|which|where|who|when|"  \
    "while|though|although|tho|right now|rn|now|nowadays|at the moment|currently|these days|btw|"  \
    "by the way|lol|haha|anyway|too|as "                                                           \
    "well|also|actually|originally|until|if|after|before|following|ever "                          \
    "since|in case|as "                                                                            \
    "(?:an?|the|one)|please|pls|permanently|(?:one|two|three|four|five|six|ten|\\d+|a few|a "      \
    "couple "                                                                                      \
    "of|several) [a-z]+ ago|last|in "                                                              \
    "(?:19|20)\\d\\d|yesterday|on (?:(?:the "                                                      \
    ")?weekends?|weekdays|(?:mon|tues|wednes|thurs|fri|satur|sun)days?|nights)|around|already|"    \
    "again|myself|instead|however|except|more than|means|feels|makes|costs|"                       \
    "in (?:the )?(?:early |late |mid-?)?(?:spring|summer|autumn|fall|winter|january|february|"     \
    "march|april|june|july|august|september|october|november|december|meantime)|this (?:year|"     \
    "month|week|spring|summer|autumn|fall|winter)|earlier|doing|studying|having|called|named|"     \
    "that|full[- ]time|part[- ]time|via|near|together|all my life|for most|the whole time|"        \
    "i|my|we|he|she|it|they|is|are|was|has|have|had|can|will|would)\\b))"
#define PHRASE_END                                                                                 \
    "(?=\\s*(?:$|[,;.!?:()\\n]|\\p{So}|\\b(?:and|but|so|because|before|after|which|when|if|"       \
    "though|"                                                                                      \
    "although|while|with|since|for (?:the|my|our))\\b))"
#define TOOL                                                                                       \
    "(?:Python|Rust|Java|JavaScript|TypeScript|C\\+\\+|C#|Golang|Go|Kotlin|Swift|SQL|R|PHP|Ruby|"  \
    "Perl|"                                                                                        \
    "Scala|Haskell|Fortran|COBOL|MATLAB|HTML|CSS|Excel|VBA|Photoshop|Illustrator|InDesign|"        \
    "Blender|"                                                                                     \
    "AutoCAD|Figma|Lightroom|Premiere|Final Cut|Ableton|SolidWorks|SketchUp|LaTeX|Bash|React|"     \
    "Django|Docker|Kubernetes|Linux|Power BI|Tableau|SPSS|Stata)(?![\\p{L}+#])"
#define WORDS "([^,;.!?:()\\n]{1,60}?)"
/* To the end of the clause. */
#define REST                                                                                       \
    "([^;.!?:()\\n]{1,120}?)(?=\\s*(?:$|[;.!?:()\\n]|\\p{So}|\\b(?:but|because|so that|"           \
    "which|though|although|tho|lol|haha|btw|by the way|anyway|if|these days|right now|when)\\b))"
#define CAP "(?-i:\\p{Lu}[\\p{L}\\p{N}'’&.-]*)"
#define TITLE "(?:(?:Dr|Mr|Mrs|Ms|Prof|Professor|Doctor)\\.? )?"
#define NAME "((?-i:\\p{Lu}[\\p{L}'’-]+(?: \\p{Lu}[\\p{L}'’-]+){0,3}))"
#define NAMES_LIST                                                                                 \
    "((?-i:\\p{Lu}[\\p{L}'’-]+(?: \\p{Lu}[\\p{L}'’-]+)?(?:(?:, | and | & |, and "              \
    ")\\p{Lu}[\\p{L}'’-]+"                                                                       \
    "(?: \\p{Lu}[\\p{L}'’-]+)?){0,5}))"
#define ADVERB                                                                                     \
    "(?:(?:really|absolutely|simply|just|also|always|still|actually|currently|now|both|do|quite|"  \
    "totally|truly|honestly|especially|particularly|mostly|mainly|usually|personally|genuinely|"   \
    "secretly|only|even|very much|already|recently|originally|officially|finally|sort of|kind of|" \
    "pretty "                                                                                      \
    "much|pretty|quite|fairly|rather|completely|severely|deathly|badly|highly|mildly|seriously|"   \
    "violently|very|super|"                                                                        \
    "so|definitely|certainly|proudly|happily|presently|basically|technically|strictly) )*"
#define N_WORD                                                                                     \
    "(?:(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?:[- "                           \
    "](?:one|two|three|four|five|"                                                                 \
    "six|seven|eight|nine))?|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"       \
    "eighteen|nineteen)"
#define MONTH                                                                                      \
    "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"             \
    "sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
#define DATE                                                                                       \
    "((?:the )?\\d{1,2}(?:st|nd|rd|th)?(?: of)?,? " MONTH "\\b(?:,? \\d{4})?|" MONTH               \
    "\\.? (?:the )?\\d{1,2}(?:st|nd|rd|th)?\\b(?:,? \\d{4})?|\\d{4}-\\d\\d-\\d\\d|"                \
    "\\d{1,2}[/.]\\d{1,2}(?:[/.]\\d{2,4})?|(?:christmas|new year's|boxing|valentine's|leap)"       \
    "(?: day| eve)?|halloween)"
#define RELATION                                                                                   \
    "((?:(?:older|younger|elder|little|big|baby|twin|half|step|late|eldest|oldest|youngest|"       \
    "middle|great)[- ])*(?:step)?(?:daughter|son|sister|brother|husband|wife|partner|boyfriend|"   \
    "girlfriend|(?:[a-z]+|\\d+)[- ](?:years?|months?|weeks?)[- ]old(?: "                           \
    "(?:son|daughter|boy|girl))?|"                                                                 \
    "first-?born|youngest|eldest|oldest|fianc[eé]e?|mother|father|mum|mom|dad|grandmother|"       \
    "grandfather|grandma|grandpa|"                                                                 \
    "granny|gran|grandad|granddaughter|grandson|aunt|auntie|uncle|cousin|niece|nephew|twins?|(?:"  \
    "baby |newborn )?(?:girl|boy)|"                                                                \
    "spouse|mother-in-law|father-in-law|sister-in-law|brother-in-law|baby|toddler|kid|child))"
#define RELATIONS                                                                                   \
    "(?:(?:[a-z]+[- ](?:year|month|week)s?[- "                                                      \
    "]old|older|younger|elder|little|big|baby|twin|half|step|"                                      \
    "grown|adult|teenage|small|young|newborn|"                                                      \
    "lovely|wonderful)[- ]?(?:up )?)*(?:step|grand)?(?:daughters?|sons?|sisters?|brothers?|"        \
    "siblings?|kids?|child(?:ren)?|boys?|girls?|twins|husband|wife|partner|boyfriend|girlfriend|"   \
    "fianc[eé]e?|nieces?|nephews?|grandchild(?:ren)?|grandkids?|toddlers?|bab(?:y|ies)|teenagers?" \
    "|newborn|triplets|(?:identical "                                                               \
    ")?twin)"
#define COUNT                                                                                      \
    "(?:a|an|one|two|three|four|five|six|seven|eight|nine|ten|\\d{1,2}|several|a couple of|"       \
    "a few)"
#define ANIMAL_WORDS                                                                               \
    "cats?|kittens?|kitty|dogs?|pupp(?:y|ies)|pup|hounds?|rabbits?|bunn(?:y|ies)|hamsters?|"       \
    "guinea pigs?|gerbils?|rats?|mouse|mice|ferrets?|parrots?|parakeets?|budgies?|budgerigars?|"   \
    "cockatiels?|cockatoos?|macaws?|canar(?:y|ies)|finch(?:es)?|chickens?|hens?|ducks?|geese|"     \
    "goose|horses?|pon(?:y|ies)|donkeys?|goats?|sheep|pigs?|cows?|llamas?|alpacas?|tortoises?|"    \
    "turtles?|terrapins?|lizards?|geckos?|iguanas?|chameleons?|bearded dragons?|snakes?|pythons?|" \
    "goldfish|koi|fish|axolotls?|tarantulas?|hedgehogs?|chinchillas?|degus?|"                      \
    "[\\p{L}]*(?:hound|terrier|poodle|doodle|poo|spaniel|retriever|shepherd|setter|pointer|"       \
    "collie|"                                                                                      \
    "mastiff|bulldog|sheepdog|wolfhound|corgi|dane)s?|labradors?|labs?|beagles?|pugs?|huskies|"    \
    "husky|whippets?|lurchers?|dachshunds?|chihuahuas?|rottweilers?|dobermans?|dalmatians?|"       \
    "boxers?|malamutes?|akitas?|shih tzus?|maltese|pomeranians?|schnauzers?|tabby|tabbies|"        \
    "siamese|maine coons?|ragdolls?|bengals?|sphynx|persians?|tomcats?|moggy|moggies|mutts?|"      \
    "mongrels?|rescues?|hens?|quails?|pigeons?|doves?|owls?|crows?|mules?|stick insects?|newts?|"  \
    "frogs?|toads?|guppies|tetras?|bettas?|betta fish|hermit crabs?|snails?|sugar gliders?|"       \
    "cockapoos?|basenjis?|vizslas?|weimaraners?|lovebirds?|mynah?s?|stallions?|mares?|foals?"
#define ANIMAL "((?:" ANIMAL_WORDS "))"
#define CONDITION_WORDS                                                                            \
    "(?:(?:(?:type "                                                                               \
    "(?:1|2|one|two)|chronic|severe|mild|high|low|rheumatoid|bipolar|coeliac|celiac|"              \
    "crohn'?s|irritable|multiple|sleep|underactive|overactive|clinical|seasonal|bad|bipolar|"      \
    "social|generalised|generalized|juvenile|gestational|ulcerative|heart|kidney|restless leg|"    \
    "parkinson'?s|hashimoto'?s|raynaud'?s|lyme|ménière'?s|meniere'?s|sickle cell|long|colour|"   \
    "color|polycystic ovary|autism spectrum|post-traumatic stress|panic|eating) )*"                \
    "(?:asthma|diabetes|diabetic|migraines?|epilepsy|arthritis|hypertension|blood pressure|"       \
    "cholesterol|eczema|adhd|add|autism|depression|anxiety|ibs|ibd|ms|pcos|ptsd|ocd|copd|"         \
    "crohn'?s|disease|syndrome|disorder|sclerosis|bowel syndrome|covid|sleep apno?ea|apno?ea|"     \
    "tinnitus|dyslexia|dyspraxia|an(?:a)?emia|gout|glaucoma|cataracts?|hay ?fever|psoriasis|"      \
    "lupus|sciatica|scoliosis|vertigo|insomnia|narcolepsy|endometriosis|fibromyalgia|"             \
    "ha?emophilia|cancer|leuka?emia|blindness|pacemaker|prosthetic leg|murmur|condition|"          \
    "[a-z]{3,}(?:itis|osis|emia|aemia|algia|pathy|oidism|betes|epsy|plegia|phobia)))"
#define CONDITION "(" CONDITION_WORDS ")"
#define CONDITION_ADJECTIVE                                                                        \
    "((?:type (?:1|2|one|two) )?(?:coeliac|celiac|diabetic|colou?r[- ]?blind|dyslexic|epileptic|"  \
    "autistic|asthmatic|deaf|hard of hearing|blind|(?:short|near|long|far)[- ]?sighted|"           \
    "lactose[- ]intolerant|gluten[- ]intolerant|an(?:a)?emic|bipolar|h(?:a)?emophiliac|"           \
    "neurodivergent|dyspraxic|partially sighted|visually impaired|hypothyroid|insomniac|"          \
    "prediabetic|hypertensive|narcoleptic|paraplegic)(?: in (?:my|one|the) (?:left |right "        \
    ")?(?:ear|eye)s?)?)"
#define DIET                                                                                       \
    "(vegans?|vegetarians?|veggie|pescatarian|pescetarian|flexitarian|fruitarian|plant[- ]based|"  \
    "gluten[- ]free|dairy[- ]free|lactose[- ]free|keto(?:genic)?|paleo|halal|kosher|low[- ]carb|"  \
    "low[- ]fodmap|teetotal|sugar[- ]free|raw vegan|carnivore|low[- ]sodium|low[- ]salt|"          \
    "mediterranean|wholefood)"
#define LANGUAGE                                                                                   \
    "((?:brazilian |mexican |swiss |sign )?(?:English|Spanish|French|German|Italian|Portuguese|"   \
    "Dutch|Flemish|Swedish|Norwegian|Danish|Finnish|Icelandic|Faroese|Polish|Czech|Slovak|"        \
    "Hungarian|Romanian|Bulgarian|Greek|Turkish|Russian|Ukrainian|Belarusian|Serbian|Croatian|"    \
    "Bosnian|Slovene|Slovenian|Albanian|Macedonian|Latvian|Lithuanian|Estonian|Maltese|Irish|"     \
    "Gaelic|Scots|Welsh|Breton|Cornish|Basque|Catalan|Galician|Occitan|Luxembourgish|Arabic|"      \
    "Hebrew|Yiddish|Persian|Farsi|Dari|Pashto|Kurdish|Urdu|Hindi|Punjabi|Bengali|Gujarati|"        \
    "Marathi|Tamil|Telugu|Kannada|Malayalam|Sinhala|Nepali|Tibetan|Burmese|Thai|Lao|Khmer|"        \
    "Vietnamese|Indonesian|Malay|Tagalog|Filipino|Cebuano|Ilocano|Javanese|Chinese|Mandarin|"      \
    "Cantonese|Hokkien|Hakka|Shanghainese|Japanese|Korean|Mongolian|Kazakh|Uzbek|Georgian|"        \
    "Armenian|Azerbaijani|Swahili|Amharic|Somali|Hausa|Yoruba|Igbo|Zulu|Xhosa|Afrikaans|Shona|"    \
    "Wolof|Twi|Tigrinya|Quechua|Guarani|Nahuatl|Hawaiian|Samoan|Maori|Māori|Esperanto|Latin|BSL|" \
    "ASL|Auslan|British Sign Language|American Sign Language|sign language|Creole|Haitian Creole|" \
    "Patois|Papiamento|Romansh|Frisian|Sami|Inuktitut|Navajo)(?: sign language)?)\\b"
#define NATIONALITY                                                                                \
    "((?:half[- ])?(?:English|British|Scottish|Welsh|Irish|Northern Irish|French|German|Italian|"  \
    "Spanish|Portuguese|Dutch|Belgian|Swiss|Austrian|Swedish|Norwegian|Danish|Finnish|Icelandic|"  \
    "Polish|Czech|Slovak|Hungarian|Romanian|Bulgarian|Greek|Turkish|Russian|Ukrainian|Serbian|"    \
    "Croatian|Bosnian|Albanian|Latvian|Lithuanian|Estonian|American|Canadian|Mexican|Brazilian|"   \
    "Argentinian|Chilean|Peruvian|Colombian|Venezuelan|Cuban|Jamaican|Australian|New Zealander|"   \
    "Kiwi|Indian|Pakistani|Bangladeshi|Sri Lankan|Nepalese|Chinese|Taiwanese|Japanese|Korean|"     \
    "Vietnamese|Thai|Filipino|Filipina|Indonesian|Malaysian|Singaporean|Iranian|Iraqi|Syrian|"     \
    "Lebanese|Israeli|Egyptian|Moroccan|Algerian|Tunisian|Nigerian|Ghanaian|Kenyan|Ethiopian|"     \
    "South "                                                                                       \
    "African|Catalan|Basque|Texan|Londoner|Glaswegian|Scouser|Geordie|Parisian|Berliner))\\b"
#define JOB                                                                                        \
    "(?:(?!(?:studying|training|applying|looking|hoping|trying|going|working|becoming|dating|"     \
    "married|"                                                                                     \
    "seeing|talking|waiting|acting|not|about|engaged|learning|planning|thinking|considering|"      \
    "never|no|"                                                                                    \
    "like|an?|the|decent|good|terrible|bad|great|lousy|awful|hopeless|keen|amateur|aspiring|"      \
    "wannabe|would-be|former|ex|"                                                                  \
    "living|staying|friends|with|in|at|on|from|to|for|of|by)\\b)"                                  \
    "(?:[\\p{L}&'/-]+ ){0,4}?[\\p{L}-]*(?:accountant|actor|actress|adviser|advisor|agent|"         \
    "analyst|anaesthetist|anesthetist|apprentice|archaeologist|archivist|artist|assistant|"        \
    "astronomer|attorney|auditor|author|baker|banker|barber|barista|barrister|bartender|"          \
    "beautician|biologist|blacksmith|bookkeeper|bricklayer|broker|builder|butcher|carer|"          \
    "caretaker|caregiver|carpenter|cashier|ceo|cfo|chaplain|chauffeur|chef|chemist|chiropractor|"  \
    "choreographer|cleaner|clerk|coach|coder|cobbler|comedian|composer|conductor|consultant|"      \
    "cook|coordinator|co-ordinator|copywriter|counsellor|counselor|courier|curator|cto|dancer|"    \
    "dealer|dentist|designer|detective|dermatologist|developer|dietitian|dietician|diplomat|"      \
    "director|diver|doctor|drummer|driver|ecologist|economist|editor|electrician|embalmer|"        \
    "employee|engineer|entrepreneur|epidemiologist|estate agent|executive|farmer|farrier|fisher|"  \
    "fisherman|firefighter|fireman|fitter|florist|forester|freelancer|gardener|geologist|glazier|" \
    "goldsmith|gp|guard|guide|hairdresser|historian|housewife|househusband|hygienist|"             \
    "illustrator|influencer|inspector|instructor|interpreter|investigator|janitor|jeweller|"       \
    "jeweler|joiner|journalist|judge|landscaper|lawyer|lecturer|librarian|lifeguard|linguist|"     \
    "locksmith|logger|machinist|magician|maker|manager|marketer|mason|masseur|masseuse|"           \
    "mathematician|mechanic|medic|merchant|meteorologist|midwife|miner|model|musician|nanny|"      \
    "neurologist|notary|novelist|nurse|nutritionist|obstetrician|officer|operator|optician|"       \
    "optometrist|organist|orthodontist|owner-operator|painter|paralegal|paramedic|pastor|"         \
    "pathologist|pediatrician|paediatrician|performer|pharmacist|philosopher|phlebotomist|"        \
    "photographer|physician|physicist|physio|physiotherapist|pianist|pilot|planner|plasterer|"     \
    "plumber|podiatrist|poet|policeman|policewoman|politician|porter|postman|postie|postdoc|"      \
    "postwoman|potter|priest|principal|printer|producer|professor|programmer|proofreader|"         \
    "psychiatrist|psychologist|publicist|radiographer|radiologist|ranger|realtor|receptionist|"    \
    "recruiter|rep|reporter|representative|researcher|retiree|roofer|sailor|salesman|saleswoman|"  \
    "salesperson|scaffolder|scientist|sculptor|seamstress|secretary|seller|shepherd|shopkeeper|"   \
    "singer|sociologist|soldier|solicitor|sommelier|sonographer|specialist|statistician|"          \
    "statistician|steward|stewardess|stonemason|strategist|stuntman|superintendent|supervisor|"    \
    "surgeon|surveyor|tailor|tattooist|teacher|technician|technologist|teller|tester|therapist|"   \
    "tiler|trader|trainer|translator|treasurer|tutor|typist|undertaker|upholsterer|vet|"           \
    "veterinarian|vicar|violinist|videographer|waiter|waitress|warden|watchmaker|weaver|welder|"   \
    "winemaker|woodworker|worker|writer|youtuber|zookeeper|zoologist|beekeeper|bus driver|"        \
    "sysadmin|admin|dev|swe|sre|pm|cameraman|hgv driver|data scientist|au pair|civil "             \
    "servant|childminder|doula|stay-at-home "                                                      \
    "(?:mum|mom|dad|parent)|flight attendant|attendant|air hostess|cabin crew|freelance "          \
    "[\\p{L}]+|architect|astronaut|ambulance crew|optometrist|actuary|bouncer|brewer|crofter|"     \
    "dj|handyman|housekeeper|lorry driver|trucker|lumberjack|monk|nun|rabbi|imam|puppeteer|"       \
    "repairer|stylist|tree surgeon|apprentice|registrar|foreman|deckhand|barman|barmaid|"          \
    "signalman|matron|locum|temp|groundskeeper|groundsman|roadie|stagehand|bosun|cabbie|clerk|"    \
    "(?:vet|lab|pharmacy|dental|sound|theatre|x-ray) tech|[\\p{L}-]+(?:ologist|grapher|iatrist|"   \
    "ician|smith|wright|monger|keeper|maker|dresser|layer|cutter|worker|minder|ranger|driver|"     \
    "teacher|builder|operator)|umpire|referee|usher|valet|conservator|restorer|linesman|"          \
    "bellmaker|dispatcher|handler|keeper|setter|grower|blogger|streamer|vlogger|landlord|"         \
    "landlady|student(?! (?:at|in|of)\\b)|intern|trainee|pensioner|founder))(?![\\w'-])"

static const struct rule en_facts[] = {
    {"pet", RULE_NAMED | RULE_KIN,
     I "^(?:(?:he|she|it) is (?:called|named)|(?:his|her|its) name is|they are "
       "(?:called|named)|their names are|"
       "i (?:named|called) (?:him|her|it)|meet) " NAMES_LIST "(?![\\w'])"},
    {"family", RULE_NAMED | RULE_KIN,
     I "^(?:(?:he|she) is (?:called|named)|(?:his|her) name is|they are (?:called|named)|their "
       "names are) " NAMES_LIST "(?![\\w'])"},
    {"family", RULE_CORRECTS | RULE_KIN | RULE_AMENDS, I "^(?:her|his) name is " NAME "()"},
    {"", RULE_CORRECTS | RULE_KIN | RULE_AMENDS,
     I "^(?:it is|spelled|spelt|the name is)(?: actually| really)? " NAME
       "()(?=\\s*(?:$|[,.!(]|with|without))"},
    {"name", 0, I "^" NAME " from (?-i:\\p{Lu})[\\p{L} -]{1,30} here\\b"},
    {"origin", 0, I "^(?-i:\\p{Lu})[\\p{L}'-]+ from " NAME " here\\b"},
    {"employer", RULE_AMENDS, I "^i am (?:now )?(?:at|with) (" CAP "(?: " CAP "){0,3})$"},
    {"", RULE_CORRECTS | RULE_AMENDS, I "^" NAME "(),? to be (?:exact|precise|specific|honest)"},
    {"", RULE_CORRECTS,
     I
     "^make (?:that|it) (\\d+|two|three|four|five|six|seven|eight|nine|ten)()(?=\\s*(?:$|[,.!]))"},
    {"name", 0, I "^" NAME " is the name\\b"},
    {"name", 0,
     I "^(?!Anyone|Any|Nothing|Everyone|Someone|Same|Not|New|Over|People|Nobody|Still|It|I|We|Who|"
       "What|Right|Winter|Summer|Student|Mum|Mom|Dad|Newbie|Long|First)(?:it is |this is )?" NAME
       "(?:(?: again)? (?:here|speaking)| again)(?=\\s*(?:$|[,.!:;-]|again|and\\b|from\\b))"},
    {"name", 0,
     I "^i (?:have )?(?:legally |officially |just )*changed my (?:first )?name(?: legally| "
       "officially)? to " NAME},
    {"name", 0,
     I
     "^(?:my (?:full |first |real )?name is|the name is|name is|(?:you can |just |please |most "
     "people |people |everyone |everybody |my friends |friends )?calls? me|i go by|i am called|"
     "i am known as)(?: actually| now)? (?!not\\b|later|back|when|if|a\\b|an\\b|the\\b)" NAME END},
    {"name", 0,
     I "^(?:my (?:full |first |real )?name is|name is) (?:(?:spelled|spelt|pronounced|written) "
       ")?(?!not\\b|on\\b|the\\b|a\\b|in\\b|too\\b|"
       "way\\b|very\\b|hard\\b|so\\b|long\\b|misspelled|wrong)"
       "([\\p{L}'’-]+)" END},
    {"name", 0,
     I "^(?:i am|this is) " TITLE "(?!" NATIONALITY "|" LANGUAGE
       "|(?:Mr|Mrs|Muslim|Catholic|Christian|"
       "Jewish|Buddhist|Hindu|Sikh|Mormon|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday|"
       "OK|Okay|AFK|ADHD|Autistic|God|New|Very|So|Not|Just|Still|Really|Gen)\\b)"
       "((?-i:\\p{Lu}\\p{Ll}[\\p{L}'’-]*(?: "
       "\\p{Lu}[\\p{L}'’-]+){0,2}))(?=\\s*(?:$|[,.!]|\\p{So}|btw|by the "
       "way|and\\b|again\\b))"},

    {"age", 0,
     I "^i (?:am|have|turned|just turned|have (?:just |recently )?turned|recently turned|am "
       "(?:now|only|about|already|just|nearly|almost)|became|have become) (?:now |only |just "
       "|already )*((?:[1-9]\\d|1[01]\\d)|" N_WORD
       ")(?= ?(?:$|[,.!?;)]|\\p{So}|years? (?:old|young|of "
       "age)\\b|y\\.?/?o\\b|now\\b|and\\b|today\\b|"
       "yesterday\\b|this\\b|in real life|irl|last\\b|btw|lol|haha|in (?:" MONTH
       "|may)\\b|next\\b|but\\b|so\\b|yrs?\\b|still\\b))"},
    {"age", 0, I "^i am an? ((?:[1-9]\\d)|" N_WORD ")[- ]years?[- ]old\\b"},
    {"age", 0, I "^as an? ((?:[1-9]\\d)|" N_WORD ")[- ]years?[- ]old\\b"},
    {"age", 0,
     I "^i have been (?:on this (?:planet|earth)|alive|around) for ((?:[1-9]\\d)|" N_WORD
       ") years"},
    {"age", 0, I "^being ((?:[2-9]\\d)|" N_WORD ")\\b(?! (?:minutes|percent|miles|km|%))"},
    {"age", 0, I "^my age is ((?:[1-9]\\d)|" N_WORD ")\\b"},
    {"age", 0,
     I "^(?:i am |i turned |turning .*?|so |aged? )?((?:[1-9]\\d)) (?:now|years? "
       "(?:old|young)|yo|y/o|yrs "
       "old)" END},
    {"age", RULE_ALSO, I "^((?:[1-9]\\d))$"},
    {"age", 0,
     I "^(?:i am )?at ((?:[1-9]\\d))(?=$|,? i (?:am|do not|should|shouldn't|can "
       "not|still|have|went|started|got|became|took|decided|finally|retired|learned))"},
    {"age", 0,
     I "^i (?:just |finally |only |recently )*(?:got|passed|started|learned|learnt|became|took "
       "up|went back)\\b[^,;.!?]{3,60}? at "
       "(?:the age of )?([2-9]\\d)(?=\\W*$)"},
    {"age", 0, I "^i (?:hit|reached) (?:the big )?((?:[2-9]\\d)) (?:last|this|in|yesterday)\\b"},

    {"birthday", 0,
     I "^(?:my )?(?:birthday|bday|b-day|date of birth|dob|birth ?date)(?: is| falls)?:?(?: coming "
       "up)?(?: on| in)? " DATE},
    {"birthday", 0, I "^(?:i (?:was|am) |being )?born (?:[^,]{0,40} )?(?:on )?" DATE},
    {"birthday", 0,
     I "^i was born in ((?:early |late )?" MONTH "(?: (?:of )?\\d{4})?|(?:19|20)\\d\\d)\\b"},
    {"birthday", 0,
     I "^(?:i (?:turn|turned|am turning|will be|will turn) \\d+|it is my (?:birthday|\\d+th)|my "
       "(?:\\d+(?:st|nd|rd|th) )?(?:birthday )?(?:is|falls)) (?:coming up )?on " DATE},
    {"birthday", 0, I "^" DATE " is my (?:birthday|bday|date of birth)\\b"},
    {"birthday", RULE_AMENDS, I "^it is (?:on )?" DATE},
    {"birthday", 0, I "^(?:i|we) (?:celebrate|have) my birthday on " DATE},

    {"residence", 0,
     I "^(?:my|our) (?:house|flat|home|place|apartment|garden) in " NAME
       " (?:has|is|needs|does|was|got|came)\\b"},
    {"residence", 0,
     I
     "^(?:i|we) (?:" ADVERB "(?:live|living|reside|settled|dwell|stay permanently)|am " ADVERB
     "(?:living|residing|settled|based|located)|have " ADVERB "(?:lived|been living|been based|"
     "settled|been)|are (?:living|based)|" ADVERB
     "(?:moved|relocated|emigrated|immigrated)|have " ADVERB
     "(?:moved|relocated|emigrated))(?: (?:here|back|over|out|down|up|away|permanently|"
     "now|alone|together|happily|full[- ]time|house|home|on my own|by myself|with my [a-z]+))*"
     "(?: from [^,]{1,30}?)? (?:in|to|near|outside|just outside|at|on) "
     "(?!an?\\b|my\\b|fear|constant|tears|this\\b|that\\b|our\\b|another|hope|bed\\b|one\\b|two\\b|"
     "there\\b|it\\b|new\\b|touch|shared|\\d)" WORDS END},
    {"residence", 0,
     I "^(?:i|we) (?:" ADVERB "(?:live|living|rent|reside)|am " ADVERB
       "living|have (?:been )?" ADVERB
       "(?:living|lived|bought|rented))(?: alone| together)? (?:in )?(?:an? |the )[a-z -]{1,40}? "
       "(?:in|near|of|outside|called) " NAME END},
    {"residence", 0, I "^(?:i|we) (?:" ADVERB ")live [a-z ]{3,30},? (?:in|near) " NAME END},
    {"residence", 0,
     I "^(?:my|our) (?:(?:own|new|tiny|little|current) )*(?:flat|house|place|home|apartment|studio|"
       "houseboat|cottage) is (?:just )?(?:in|near|outside) (?:the )?" NAME},
    {"residence", 0,
     I "^(?:since (?:moving|i moved|we moved|relocating) to|(?:up |down |out |over |back |round "
       ")?here in) " NAME},
    {"residence", 0,
     I "^(?:i|we) (?:have )?(?:" ADVERB "(?:put down roots|set up home|made (?:my|our) home|"
       "bought (?:a|our|my) (?:[a-z]+ )?(?:house|flat|place|home)|ended up(?: living)?)) in " NAME
           END},
    {"residence", 0,
     I "^(?:my )?(?:home|current home|home base|home now) (?:is|has been) "
       "(?:now |in )*" NAME END},
    {"residence", 0, I "^i (?:am|have been) a (?:" NAME ") resident"},
    {"residence", 0, I "^(?:i )?(?:call|have called) " NAME " home\\b"},

    {"origin", 0,
     I "^i am (half[- ](?-i:\\p{Lu})[\\p{L}]+(?:,? (?:and )?half[- ](?-i:\\p{Lu})[\\p{L}]+)?)" END},
    {"origin", 0, I "^(?:i|we) (?:have )?(?:moved|came) (?:here|over) from " NAME},
    {"origin", 0,
     I "^i am an? (?!.*(?:student|graduate|recovering))(?:[\\p{L}'-]+ ){1,4}from " NAME END
       "(?<!University)(?<!College)(?<!School)"},
    {"origin", 0, I "^as (?:someone|a person|a [\\p{L}]+) from " NAME END},
    {"origin", 0,
     I "^(?:i|we) (?:am|come|hail|are|" ADVERB "come|am " ADVERB
       ")(?: originally)? (?:from|out of) (?!here|there|work|home\\b|the "
       "(?:future|office)|my\\b|a\\b)" WORDS END},
    {"origin", 0,
     I "^(?:i (?:am|come|hail) )?(?:originally )?from an? [a-z -]{2,30} "
       "(?:in|near|outside|called|of) " NAME END},
    {"origin", 0,
     I "^i (?:was|am) (?:" ADVERB
       ")?(?:born|raised|born and raised|born and bred|brought up)(?: and "
       "(?:raised|bred|grew up))? (?:and (?:raised|bred) )?in (?!the winter|the summer|the "
       "year|" MONTH "|\\d|a\\b)" WORDS END},
    {"origin", 0,
     I "^i (?:grew up|was raised|was born) (?:on|in|at|near) an? [a-z ]{2,25} "
       "(?:in|near|outside|of) " NAME END},
    {"origin", 0, I "^i (?:grew up|spent my childhood) in (?!a\\b|the \\d|an\\b)" WORDS END},
    {"origin", 0,
     I "^(?:i am )?(?:an? )?(?!Being|Was|First|Baby|Newly|I)" NAME
       " (?:born and (?:bred|raised)|native|born)\\b"},
    {"origin", 0,
     I "^(?:my )?(?:hometown|home town|birthplace|native (?:country|city|town)) (?:is|was) " NAME
         END},
    {"origin", 0,
     I "^my (?:roots|people|ancestors|family roots) are (?:all )?(?:in|from) " NAME END},
    {"origin", 0, I "^(?:i am )?" NATIONALITY " by birth\\b"},
    {"origin", 0, I "^i am a native of " NAME END},
    {"origin", 0,
     I "^i am (?:" ADVERB ")(?:a |an )?" NATIONALITY
       "(?= ?(?:$|[,.!?;)]|\\p{So}|and\\b|by\\b|but\\b|so\\b|originally|myself|living|born))"},

    {"occupation", 0, I "^i (?:earn|make|pay|fund) my [a-z]+ (?:as|by being) (?:an? )?" WORDS END},
    {"occupation", 0,
     I "^i (drive (?:trams|buses|taxis|trucks|lorries|trains|cabs|ambulances))\\b"},
    {"occupation", 0,
     I "^i (?:" ADVERB "work|am " ADVERB "(?:working|employed)|have (?:been )?" ADVERB
       "(?:worked|working|been employed)|worked)(?: (?:full|part)[- ]time| nights?| days?| here| "
       "freelance| "
       "remotely)* as (?:an? |the )?" WORDS "(?=\\s*(?:at|for|in|on|near|from)\\b|"
       "\\s*$|" END ")"},
    {"occupation", 0,
     I "^i (?:do|work|serve|volunteer|earn|have been|spend|started|freelance|temp|moonlight)\\b"
       "[^,;.!?]{0,40}? as an? (" JOB ")"},
    {"occupation", 0,
     I "^i am (?:currently |now |just |still |only )*(?:an? |in my )(?:[\\p{L}\\p{N}'-]+ "
       "){0,3}?(student|undergrad(?:uate)?|postgrad(?:uate)?|freshman|sophomore)(?= "
       "(?:at|in|of|doing|"
       "studying|who|from)\\b)"},
    {"occupation", 0,
     I "^(?:i (?:am|have been|became|have become|am now|just became)) (?:" ADVERB
       ")(?:an?|the|your) (?!student|founder|(?:decent|good|terrible|bad|great)\\b)(" JOB
       ")(?! (?:at heart|in my (?:spare|free)))"},
    {"occupation", 0,
     I "^i (?:work|am working|am employed) (?:at|for|with|in) [^,]{1,40}? as (?:an? |the )?" WORDS
         END},
    {"occupation", 0,
     I "^(?:i am )?(?:an? )?" WORDS " (?:by trade|by profession|by training|for a living)\\b"},
    {"occupation", 0,
     I "^(?:i have )?(?:[\\w-]+ ){1,5}(?:years?|decades?|months?) (?:now )?(?:as|being|of being|"
       "working as) (?:an? )?(" JOB ")"},
    {"occupation", 0, I "^i (drive (?:an? |the )?[a-z ]{2,20}) for a living"},
    {"occupation", 0,
     I "^(?:for work|by day|for a living|professionally|at work),? i (?:am )?(?:an? )?(?!have "
       "to|can\\b|use\\b|need|"
       "must|get\\b)([\\p{L}][^,;.!?:()\\n]{2,40}?)" END},
    {"occupation", 0,
     I "^i (?:do|work|handle|run|manage)(?: the| in| on)? ([\\p{L} ]{3,30}?) (?:at|for) (?:an? "
       "|the )(?:[\\p{L}-]+ )?(?:"
       "clinic|school|hospital|hotel|company|firm|bank|shop|factory|museum|library|theatre|theater|"
       "restaurant|council|"
       "charity|startup|agency|university|gym|station|airport|farm|bakery|pharmacy)\\b"},
    {"occupation", 0,
     I "^i have been (teaching [\\p{L} ]{3,20}?|nursing|driving (?:a )?[\\p{L} "
       "]{3,20}?|farming)" END},
    {"occupation", 0,
     I
     "^(?:an? )?(" JOB ")(?=, "
     "(?:night|day|part|full|self|retired|mum|mom|dad|\\d|based|from|living|need|looking|by)\\b)"},
    {"occupation", 0, I "^(?:an? )?(" JOB ") here\\b"},
    {"occupation", 0,
     I "^i (?:work|am working) in "
       "(?!progress|team|shift|pair|silence|bed|burst|an?\\b|group|person|town|it\\b|peace|private|"
       "the\\b|my\\b|"
       "one|two|three)((?-i:[a-z])[a-z ]{2,25}?)" END},
    {"occupation", 0,
     I "^(?:i )?(?:have )?(?:just |recently )*(?:(?:got|have|landed|found|took|started) a(?: new)? "
       "job|started(?: "
       "out| work| working)?|trained|retrained|qualified|freelance) as (?:an? )?" WORDS END},
    {"occupation", 0, I "^i do (freelance [\\p{L} ]{3,25}?)(?= (?:from|for|at|on)\\b|" END ")"},
    {"occupation", 0,
     I "^i am (?:" ADVERB
       ")(?:an? |the )(?!.*\\b(?:student|pupil|undergrad\\w*|postgrad\\w*|freshman|sophomore|"
       "junior|senior|regular|member|fan|customer|client|guest|patient|volunteer|subscriber|user|"
       "whizz|"
       "beginner|genius|pro|natural) (?:at|for|with))([\\p{L}][\\p{L}\\p{N}/& -]{2,38}?) "
       "(?:at|for|with) (?:the )?" CAP "(?!'s)"},
    {"occupation", 0, I "^i do " WORDS " for a living\\b"},
    {"occupation", 0, I "^i ((?!do\\b|need|have|am\\b)[a-z]+ [\\p{L} ]{2,25}?) for a living\\b"},
    {"occupation", 0,
     I
     "^(?:my|the) (?:day )?(?:job|occupation|profession|line of work|day job|career|trade) is "
     "(?:an? |being an? |as an? |in "
     ")?(?!not|to|so|really|very|stress|kill|bor|great|fine|ok|hard|driving me|draining|the)" WORDS
         END},
    {"occupation", 0,
     I "^(?:as|being) an? (" JOB ")(?=,? i\\b| (?:means|is|makes|teaches|has|taught)\\b|$)"},
    {"occupation", 0,
     I "^i (?:make a living|earn my living|make my living) (?:as an? |by |from )?" WORDS END},
    {"occupation", 0, I "^i (?:am|have been) (retired|self-employed|unemployed|a freelancer)" END},
    {"occupation", 0,
     I "^i ((?:run|manage) (?:an? |my own |the )?(?:small |little |family )?(?:[a-z]+ "
       ")?(?:bakery|shop|caf[eé]|restaurant|pub|farm|business|company|studio|salon|bookshop|garage|"
       "hotel|b&b|nursery|stall|brewery|agency|practice))\\b"},
    {"occupation", 0,
     I "^i (teach "
       "(?!my|you|him|her|them|myself)[^,;.!?:()\\n]{1,40}?)(?=\\s*(?:at|in|to|for)\\b|\\s*$)"},
    {"occupation", RULE_ALSO, "^(" JOB ")$"},

    {"employer", 0,
     I "^i (?:run|do|handle|lead|head|design|clean|sell|build|edit|test) [a-z ]{2,25} (?:at|for) "
       "(?:the )?(" CAP "(?: " CAP "){0,3})" END},
    {"employer", 0,
     I "^i (?:" ADVERB "(?:work|code|drive|teach|am|nurse|cook|manage [a-z]+)|am " ADVERB
       "(?:working|employed)|have " ADVERB "(?:worked|been working|been)|worked|" ADVERB
       "(?:joined|started(?: working)?|got a job|landed a job)|have (?:just |recently "
       ")?(?:joined|started(?: working)?))"
       "(?: (?:full|part)[- ]time| nights?| days?| in [a-z]+| remotely| here| a job| as an? "
       "[^,]{1,40}?| an? (?:" JOB ")| the (?:" JOB "))* "
       "(?:for|at|by|with|over at) (?:the )?((?-i:\\p{Lu}[\\p{L}\\p{N}'’&.-]*)(?: "
       "(?:(?-i:\\p{Lu}[\\p{L}\\p{N}'’&.-]*)|of|and|&|for)){0,5}?)" END},
    {"employer", 0,
     I "^(?:i )?(?:just |recently )?joined (?:the )?(" CAP "(?: " CAP
       "){0,4})(?=\\s*(?:$|[,;.!?]|in\\b|last\\b|as\\b|and\\b|this\\b))"},
    {"employer", 0,
     I "^my (?:current |new )?(?:employer|company|workplace|firm) is (?:called )?(?:the )?(" CAP
       "(?: " CAP "){0,4})" END},
    {"employer", 0,
     I "^i am (?:" ADVERB
       ")(?:an? |the )(?!.*\\b(?:student|pupil|undergrad\\w*|postgrad\\w*|freshman|sophomore|"
       "junior|senior|regular|member|fan|customer|client|guest|patient|subscriber|user|whizz|"
       "beginner|genius|pro|natural) (?:at|for|with))(?:[\\p{L}\\p{N}/&-]+ ){1,5}?(?:at|for|with) "
       "(?:the )?(" CAP "(?:(?: of| and| &)? " CAP "){0,4})" END},
    {"employer", 0,
     I "^i (?:work|am working|have (?:just )?(?:been|worked|started)|am)(?: working)? "
       "(?:at|for|with) an? "
       "[a-z -]{2,30} (?:called|named) (" CAP "(?: " CAP "){0,3})" END},
    {"employer", 0,
     I "^(?:i )?(?:was |got |have been )(?:just |recently )?(?:hired (?:by|at)|taken on (?:by|at)) "
       "(?:the )?(" CAP "(?: " CAP "){0,3})" END},
    {"employer", 0,
     I "^i am (?:on|in) the [a-z -]{2,30} (?:team|department|desk|crew|shift|floor) (?:at|of) "
       "(?:the )?(" CAP "(?: " CAP "){0,3})" END},
    {"employer", 0,
     I "^my (?:employer|company|firm),? (" CAP "(?: " CAP "){0,3})(?=,| has| is| just)"},

    {"school", 0,
     I
     "^i .*?\\b(?:study|studying|studied|reading|read|do|doing) (?!my\\b|the\\b)[a-z][a-z &]{2,30} "
     "at (?:the )?(" CAP "(?:(?: of| and)? " CAP "){0,4})" END},
    {"school", 0,
     I "^i (?:" ADVERB "(?:study|go|attend|enrolled|read|graduated)|am " ADVERB
       "(?:studying|enrolled|doing|reading|going|attending|at|finishing)|have "
       "been "
       "(?:studying|doing|attending)|just started)\\b(?: [^,]{0,45}?)?"
       "?(?: at| to| with| from|(?<=attend)|(?<=attending)) (?:the )?"
       "((?-i:\\p{Lu}[\\p{L}'’&.-]*)(?:(?: (?:of|at|and|de|the)){0,2} "
       "(?-i:\\p{Lu}[\\p{L}'’&.-]*)){0,5}(?: (?:university|college|school|uni))?)" END},
    {"school", 0,
     I "^(?:i am )?(?:in )?(?:my |the "
       ")?(?:first|second|third|fourth|fifth|final|last|1st|2nd|3rd)[- ]year(?: of| in| "
       "student| studying| doing)?(?: [a-z ]{2,30})? at (?:the )?(" CAP "(?:(?: of| and)? " CAP
       "){0,4})" END},
    {"school", 0,
     I "^my (?:school|university|uni|college|alma mater|high school) is (?:called )?(?:the )?(" CAP
       "(?:(?: of| and)? " CAP "){0,4})" END},
    {"school", 0,
     I "^(?:i am )?(?:an? )?(?:[\\p{L}-]+ "
       "){0,3}(?:student|undergrad|undergraduate|freshman|sophomore|junior|senior|fresher|phd|"
       "postgrad|pupil)(?: [\\p{L} ]{0,30}?)? (?:at|from) (?:the )?(" CAP "(?:(?: of| and)? " CAP
       "){0,4})" END},

    {"family", 0,
     I "^(?:i|we) (?:live with|care for|look after) my ((?:elderly |old |sick "
       ")?(?:grand)?(?:mother|father|parents|ma|pa|mum|mom|dad))\\b"},
    {"family", RULE_NAMES | RULE_KIN | RULE_EACH,
     I "\\b(?:my|our) " RELATION
       "(?: is (?:called|named)| is name is| name is|'s name is|’s name is|,? "
       "(?:called|named)|,|:)? (?!I\\b|Is\\b)" NAMES_LIST "(?![\\w])"},
    {"family", RULE_NAMES | RULE_KIN,
     I "\\b(?:my|our) (?:(?:two|three|four|five) )?"
       "(daughters|sons|boys|girls|kids|brothers|sisters|cousins),? (?:called |named )?" NAMES_LIST
       "(?!\\w)"},
    {"family", RULE_SWAP | RULE_KIN,
     I "^" NAME "(?:, | is |, who is )my " RELATION "\\b(?! of| tongue| country| language)"},
    {"family", RULE_NAMES,
     I "^(?:i|we) (?:have|have got|had|also have)(?: only)? (?:got )?(?:an? |one |two |three |four "
       ")" RELATION "s?,? (?:(?:called|named),? )?" NAMES_LIST "(?!\\w)"},
    {"family", RULE_LIST,
     I "^(?:i|we) (?:" ADVERB "have|have got)(?: only| just)? (" COUNT " " RELATIONS
       "(?:(?:,| and|, and) " COUNT " " RELATIONS ")+)\\b"},
    {"family", 0,
     I "^(?:i|we) (?:" ADVERB "have|have " ADVERB
       "(?:got|had))(?: only| just)? (?:an? |one (?=\\w+ "
       "(?:sister|brother)))?((?:(?:two|three|four|five|six|seven|eight|\\d|twin|one|several) "
       ")?" RELATIONS ")\\b(?! (?:of (?:mine|yours)|who|name|meal|food|menu|seat|room))"},
    {"family", 0,
     I
     "^(?:i am )?(?:an? )?(?:(?:proud|single|busy|tired|new|married|divorced|widowed)(?: and)? ?)*"
     "(?:(?:mum|mom|dad|mother|father|parent)? ?(?:of|to|with)) "
     "((?:two|three|four|five|six|\\d|twin|one|an?) " RELATIONS "|twins|triplets)\\b"},
    {"family", 0,
     I "^i am (?:an? |the )?(?:proud |single |new "
       ")?(?:mother|father|mum|mom|dad|parent|grandmother|grandfather|gran|grandma|grandpa) "
       "(?:of|to) ((?:an? )?(?:two|three|four|five|six|\\d|twin|a|one)?(?: " RELATIONS
       ")?)(?=\\W|$)"},
    {"family", 0,
     I "^(?:i|we) (?:just |recently )?(?:have (?:just )?)?(?:had|welcomed|adopted|are raising) "
       "(?:an? |our )?((?:baby |newborn |little )(?:girl|boy|daughter|son))\\b"},
    {"family", 0,
     I "\\bi (?:live with|care for|look after|am married to) my (" RELATIONS ")\\b(?! [A-Z])"},

    {"pet", RULE_NAMES,
     I
     "^(?:my|our) (?:[a-z-]+ ){0,2}?" ANIMAL
     "(?: is (?:called|named)| is name is|'s name is|’s name is|,? (?:called|named)|,)? " NAMES_LIST
     "(?!\\w)"},
    {"pet", RULE_NAMES,
     I "\\b(?:have|got|own|adopted|rescued|bought|keep|with|having|am owner of|getting|ended up "
       "with|foster(?:ing)?|looking after)(?: just| "
       "recently| also)?(?: got| adopted)? (?:" COUNT
       "|my|our|this|the) (?:[\\p{L}-]+ ){0,3}?" ANIMAL
       "(?:,? (?:called|named|(?:who|that|which) (?:is|are) (?:called|named)|by the name "
       "of)|,|:)? " NAMES_LIST "(?!\\w)"},
    {"pet", RULE_NAMES,
     I "^there is an? (?:[a-z-]+ ){0,2}?" ANIMAL
       " (?:in|at) [a-z ]{2,20}? (?:called|named) " NAMES_LIST "(?!\\w)"},
    {"pet", RULE_SWAP, I "^" NAME "(?:, | is |, who is )my (?:[a-z-]+ ){0,2}?" ANIMAL "\\b"},
    {"pet", 0,
     I "^(?:there is (?:an? )?((?:[a-z-]+ ){0,2}?(?:" ANIMAL_WORDS
       ")) in my (?:life|house|home|flat|kitchen)|(?:i|we) share "
       "(?:my|our|the|a) [a-z ]{2,20} with (?:an?|my|our) ((?:[a-z-]+ ){0,2}?(?:" ANIMAL_WORDS
       ")))\\b"},
    {"family", 0,
     I "^(?:i|we) (?:homeschool|are raising|am raising|raise|have raised) (?:our |my "
       ")?((?:two|three|four|five|six|twin) " RELATIONS ")\\b"},
    {"family", 0,
     I "^raising ((?:two|three|four|five|twin) " RELATIONS "|(?:two|three) teenagers)\\b"},
    {"pet", 0,
     I "^(?:i|we) (?:" ADVERB "(?:have|own|adopted|rescued|keep|got|bought)|have " ADVERB
       "(?:got|adopted|rescued|had|bought))(?: just| recently)? (?:an? |one |our "
       ")?((?:(?:two|three|four|five|six|seven|\\d{1,2}|several) "
       ")?(?:(?:black|white|old|little|big|rescue|pet|tropical|marine|bantam|young|tiny|elderly|"
       "grumpy|lazy|brown|grey|"
       "ginger|fat) )*(?:" ANIMAL_WORDS
       "))(?![\\w'-])(?! (?:food|bed|person|allergy|toy|hair|cage|tank|nap|and chips))"},

    {"pet", 0,
     I "^(?:my|our) (?:[a-z-]+ ){0,1}?((?:" ANIMAL_WORDS
       "))(?= (?:is|was|will|keeps|has|can|won't|does|just|refuses|loves|hates|eats|"
       "and i)\\b)"},

    {"pet", 0,
     I "^(?:i|we) (?:am |are )?liv(?:e|ing) [^,;.!?]{0,40}?with (?:my |our |an? "
       ")?((?:(?:two|three|four|\\d) )?(?:(?:rescue|old|little|"
       "black|elderly|big) )*(?:" ANIMAL_WORDS "))(?![\\w'-])(?! [A-Z])"},
    {"pet", 0,
     I "^i am (?:the )?(?:proud |happy )?owner of (?:an? )?((?:[a-z-]+ ){0,2}?(?:" ANIMAL_WORDS
       "))\\b"},
    {"likes", RULE_LIST,
     I "^what i (?:love|like|enjoy|adore)(?: the)?(?: most| best)? is (?!when|how|that)" REST},
    {"likes", 0,
     I "^i find (?!it\\b|this|that|your|him|her)([\\p{L} ]{3,25}?) "
       "(?:fascinating|relaxing|delightful|soothing|irresistible)\\b"},
    {"dislikes", 0,
     I "^i find (?!it\\b|this|that|your|him|her)([\\p{L} ]{3,25}?) "
       "(?:unbearable|disgusting|revolting|dreadful|unpleasant|gross)\\b"},

    {"likes", RULE_LIST,
     I "^(?:i|we) (?:" ADVERB "(?:love|like|adore|enjoy|dig|prefer)|am " ADVERB
       "(?:into|fond of|keen on|crazy about|mad about|nuts about|obsessed with|partial to|"
       "passionate about|hooked on|addicted to|interested in|a "
       "(?:(?:big|huge|massive|real|lifelong|great|diehard|total) )?"
       "(?:fan|lover|sucker|fanatic) (?:of|for))|can not (?:get enough of|live "
       "without|resist)|have (?:always|long) "
       "(?:loved|liked|adored|enjoyed)|have a (?:soft spot|weakness|thing|passion) for|have grown "
       "to (?:love|like)|would die for|"
       "have come to love) "
       "(?!it\\b|this\\b|that\\b|these\\b|those\\b|them\\b|you\\b|your\\b|how\\b|what\\b|when\\b|"
       "where\\b|if\\b|"
       "him\\b|her\\b|the "
       "(?:way|idea|fact|first|second|third|last|look|sound|one|answer|plan|new|other)\\b|to "
       "(?:know|see|hear|say|"
       "think|be able|ask|have|get|thank|avoid|keep|book|order)\\b|my\\b|being on hold|a "
       "(?:bit|lot)|an?\\b(?! good| nice| cold| strong| cup))" REST},
    {"likes", RULE_LIST,
     I "^my (?:all[- ]time |absolute |two |three )*(?:favou?rites?|fave|fav)(?: "
       "(?!is\\b|are\\b)[\\p{L} -]{1,40}?)? (?:is|are|has to be|have to be|would be|has always "
       "been|will always be) (?:definitely |always |probably |still )?(?!not\\b)" REST},
    {"likes", RULE_LIST,
     I "^(?:the )?(?:one |only |single "
       ")?(?:food|thing|drink|smell|sound|vegetable|dish|flavou?r)s? (?:that )?i (?:" ADVERB
       ")?(?:love|like|enjoy|adore)(?: most| best)? (?:is|are) " REST},
    {"likes", RULE_LIST,
     I "^my (?:comfort food|weakness|(?:guilty )?pleasure|passion|kryptonite|drink of choice|go-to "
       "[a-z]+) (?:is|are) (?!that\\b)" REST},
    {"likes", RULE_LIST,
     I "^(?:honestly )?nothing (?:beats|tops|compares to|is better than) (?:an? )?" REST},
    {"likes", RULE_LIST,
     I "^(?!it\\b|this\\b|that\\b|which\\b|he\\b|she\\b|what\\b)" WORDS
       " (?:is|are) (?:my (?:all[- ]time |absolute "
       ")?(?:favou?rites?|fave|thing|jam|weakness|guilty pleasure|comfort food|passion))\\b"},
    {"likes", RULE_LIST,
     I "^(?:i am )?(?:an? )?(?:big|huge|massive|lifelong|long-time) (?:fan|lover) of " REST},
    {"likes", RULE_LIST,
     I "^i (?:could|can) (?:eat|drink|watch|listen to|read|live on) "
       "(?!anything|everything|it\\b|this\\b|"
       "a horse)([^,;.!?()\\n]{1,40}?) (?:all day|every day|forever|for days|three meals|day and "
       "night|until|for breakfast)"},
    {"likes", RULE_LIST,
     I "^i (?:" ADVERB ")?(?:have a sweet tooth for|can not say no to|am a sucker for|am an? "
       "(?:absolute |total )?addict for|swear by|worship) (?!it\\b|this\\b|that\\b|you\\b)" REST},

    {"dislikes", RULE_LIST,
     I
     "^(?:i|we) (?:" ADVERB "(?:hate|dislike|detest|loathe|despise|abhor)|(?:really |absolutely "
     "|just |simply )*can ?not (?:really )?(?:stand|bear|abide|stomach|"
     "tolerate)|(?:really |just |honestly |still )*do not (?:really |much |particularly "
     ")?(?:like|enjoy|care for|fancy|love)|am "
     "(?:really |definitely )?(?:not (?:really |much |particularly |too |very )?(?:a (?:big |huge "
     ")?fan of|into|"
     "keen on|fond of|a lover of)|sick of|no fan of|put off by|repulsed by|grossed out by)|have "
     "(?:always |never )(?:hated|disliked|detested|liked|enjoyed|been (?:a fan of|into|keen on))|"
     "never (?:liked|enjoyed)|could never stand|have a strong dislike (?:of|for)) "
     "(?!it\\b|this\\b|that\\b|these\\b|those\\b|them\\b|you\\b|your\\b|how\\b|what\\b|when\\b|"
     "where\\b|if\\b|him\\b|"
     "her\\b|to (?:say|ask|bother|be|admit|see|interrupt|disturb|think|complain)\\b|the "
     "(?:way|idea|fact|first|second|look|sound|one|answer|new)\\b|my (?:life|job|hair|boss))" REST},
    {"dislikes", RULE_LIST,
     I "^(?!it\\b|this\\b|that\\b|which\\b|he\\b|she\\b)" WORDS
       " (?:is|are) (?:not my (?:thing|cup of tea|jam)|my (?:pet peeve|least favou?rite|(?:worst "
       ")?nightmare)|disgusting to me)\\b"},
    {"dislikes", RULE_LIST,
     I "^(?!it\\b|this\\b|that\\b|which\\b|he\\b|she\\b)" WORDS
       " (?:(?:really |absolutely |honestly "
       ")?(?:terrif(?:y|ies)|scares?|disgusts?|repels?|annoys?|bores?|"
       "infuriates?|repulses?|horrif(?:y|ies)|irritates?) me\\b|freaks? me out|gives? me the "
       "creeps|creeps? me out|bores? me to (?:tears|death)|"
       "drives? me (?:mad|crazy|nuts|up the wall)|(?:tastes?|smells?) like [a-z ]+ to me)"},
    {"dislikes", RULE_LIST,
     I "^(?:the )?(?:one |only |single "
       ")?(?:food|thing|drink|smell|sound|vegetable|dish|flavou?r)s? (?:that )?i "
       "(?:" ADVERB ")?(?:can not (?:stand|abide|bear|eat)|hate|detest|loathe|dislike)(?: most)? "
       "(?:is|are) " REST},
    {"dislikes", RULE_LIST,
     I "^my (?:least favou?rite|most hated|pet peeve|pet hate)(?: [\\p{L} ]{1,30}?)? "
       "(?:is|are) " REST},
    {"dislikes", RULE_LIST,
     I "^" WORDS " (?:makes? me (?:gag|sick|retch)|grosses? me out|turns? my stomach)\\b"},

    {"allergy", RULE_LIST,
     I "^i (?:break out in|get|come out in) (?:hives|a rash) (?:when i (?:eat|touch|drink)|from|if "
       "i (?:eat|touch)) " REST},
    {"allergy", RULE_LIST,
     I "\\bi (?:am|have (?:always |long )?been|was diagnosed as|turned out to be|became) " ADVERB
       "(?:and [a-z]+ly )?allergic to (?:is "
       ")?(?!it\\b|them\\b|that\\b|this\\b|mondays?|work\\b|sand, "
       "you)" REST},
    {"allergy", RULE_LIST,
     I "\\b(?:have|with|had|got|because of|due to) (?:(?:an?|my|this|the) "
       ")?(?:(?:pretty|quite|rather|very|really|fairly|severe|bad|serious|mild|nasty|terrible|"
       "strong|life-threatening|lifelong|slight) )*+(?![\\p{L} -]* allergy to )(?!food |seasonal "
       "|skin |allerg)([\\p{L} -]{2,30}?) allerg(?:y|ies)\\b"},
    {"allergy", RULE_LIST, I "^my ([\\p{L} -]{2,30}?) allergy\\b"},
    {"allergy", RULE_LIST,
     I "^(?:i have )?(?:got )?(?:an? "
       ")?(?:(?:pretty|quite|rather|very|really|severe|bad|serious|mild|nasty|"
       "slight|life-threatening) )*allergy to " REST},
    {"allergy", RULE_LIST,
     I "^(?!it\\b|this\\b|that\\b|which\\b|they\\b|he\\b|she\\b)" WORDS
       " (?:(?:would|will|could|can) (?:literally |actually |probably )?kill me|makes? me "
       "(?:sneeze|wheeze|itch|break out)|"
       "(?:sends?|puts?) me (?:to|in) (?:the )?(?:a&e|e\\.?r\\.?|hospital)|"
       "gives? me (?:hives|a rash|an allergic reaction)|makes? (?:me|my "
       "(?:throat|face|lips|tongue|mouth)) (?:swell|break out in hives)|brings? me out in "
       "(?:hives|a rash))"},
    {"allergy", RULE_LIST,
     I "^i have (?:an? )?(?:bad|severe|terrible|nasty|allergic) reactions? to " REST},
    {"allergy", RULE_LIST,
     I "^(?:i|my (?:skin|body)) reacts? (?:very |really )?(?:badly|terribly|violently) to " REST},
    {"allergy", 0, I "^(?:severe |bad |serious )?([\\p{L} -]{2,25}?) allergy (?:here|sufferer)\\b"},

    {"diet", 0,
     I "^(?:i|we) (?:am|are|have been|went|have gone|became|turned|am "
       "strictly|eat|keep|follow|stick to|cook|only eat|am on|have become)(?: "
       "(?:been|an?|the|on|only|strictly|strict|mostly|fully|a "
       "strict|lifelong|completely|100%|now|committed|proud|ovo-lacto|lacto|diet "
       "of|eating|following|doing|keeping|recently|always|entirely))* " DIET
       "(?! (?:curious|restaurant|option|friend))"},
    {"diet", 0, I "^(?:(?:just|recently) )?(?:went|gone|turned|became) " DIET "\\b"},
    {"diet", 0, I "^(?:as an?|being an?|being|been) (?:[\\p{L}-]+ )?" DIET "\\b(?! who)"},
    {"diet", 0, I "^(?:so )?(?:now )?" DIET "(?:$| now| these days| for \\w+| since\\b)"},
    {"diet", 0,
     I "^i ((?:do not|never|no longer) eat (?:any )?(?:red |processed "
       ")?(?:meat|pork|beef|fish|dairy|gluten|animal "
       "products)(?:,? or [a-z ]{3,20}?)?)" END},
    {"diet", 0, I "^(?:strict |lifelong )?" DIET " here\\b"},
    {"diet", 0, I "^" DIET " only\\b"},
    {"diet", 0, I "^(?:my|our) diet is (?:strictly |mostly )?" DIET},

    {"health", RULE_LIST,
     I "\\b(?:i have|i have got|i suffer from|i live with|i struggle with|i was born with|i was "
       "diagnosed with|i got diagnosed with|i have been diagnosed with|diagnosed with|someone "
       "with|i have had|i "
       "deal with|i also have|i have always had|i am being treated for|i take "
       "(?:medication|pills|tablets|medicine|meds) for|i am on (?:medication|meds|tablets|pills) "
       "for|the doctor says i have)(?: "
       "(?:got|had|always|recently|a|an|bad|quite|really|mild|severe|chronic|pretty|terrible|some))"
       "* (" CONDITION_WORDS "(?:(?:,| and|, and)(?: also)? " CONDITION_WORDS ")*)(?!\\w)"},
    {"health", 0,
     I "\\b(?:my|with my|because of my|due to my) "
       "(?!(?:sister|brother|mum|mom|dad|mother|father|wife|husband|son|daughter|friend)"
       "\\b)" CONDITION "(?!\\w)"},
    {"health", 0,
     I "^(?:i (?:am|have been|was born)|as an?|being) (?:" ADVERB ")(?:an? )?" CONDITION_ADJECTIVE
       "(?!\\w)"},
    {"health", 0, I "^" CONDITION_ADJECTIVE "(?= (?:since|from birth|here|by birth)\\b|$)"},
    {"health", 0, I "^i am (pregnant|expecting(?: a baby| twins)?)\\b"},
    {"health", 0,
     I "^i (?:have )?(?:had|survived|am recovering from|got) (?:an? "
       ")?((?:kidney|heart|liver|lung|bone marrow|corneal?) "
       "transplant|(?:hip|knee|shoulder) replacement|(?:heart|gastric|triple) bypass|stroke|heart "
       "attack|mastectomy|"
       "hysterectomy|spinal fusion)\\b"},
    {"health", 0,
     I "^i (?:wear|use|have) (hearing aids?|a (?:prosthesis|pacemaker|stoma bag|insulin "
       "pump|prosthetic [a-z]+))\\b"},
    {"health", 0,
     I "^i (?:am on|take|need) (?:daily |strong )?" CONDITION
       " (?:medication|meds|pills|tablets|medicine)"},
    {"health", 0, I "^as an? (wheelchair|hearing aid) user\\b"},
    {"health", 0, I "^i (?:use|am in) a (wheelchair|hearing aid|cane|walking frame)\\b"},

    {"language", 0,
     I "(?:mother tongue|native language|first language|native tongue|home language) "
       "(?:is|was) " LANGUAGE},
    {"language", 0,
     I "^" LANGUAGE
       " (?:is|was) my (?:mother tongue|native|first|second|third|home) ?(?:language|tongue)?"},
    {"language", RULE_EACH,
     I "(?:^(?:i|we) (?:can |also |only |" ADVERB
       "|mostly )*(?:speak|understand|know|grew up speaking|am (?:a "
       ")?(?:native|fluent|bilingual|trilingual|conversational|conversant|good|proficient)(?: in| "
       "speaker of| at| at speaking)?|am fluent|can read|taught "
       "myself|learned|learnt)[^.;]*?|\\G(?!^)[^.;]*?)\\b" LANGUAGE},
    {"language", RULE_EACH,
     I "(?:^i (?:can )?(?:" ADVERB ")?(?:get by|converse|hold a conversation|manage|chat) "
       "in\\b[^.;]*?|\\G(?!^)[^.;]*?)\\b" LANGUAGE},
    {"language", 0,
     I "^my " LANGUAGE
       " is (?:fluent|good|decent|excellent|pretty|quite|rusty but|near|okay|passable|"
       "not bad|better)"},

    {"skill", 0,
     I "^i (?:" ADVERB ")can (?:" ADVERB
       ")((?:play|juggle|cook|sing|draw|paint|code|program|knit|crochet|sew|ski|swim|dance|drive|"
       "ride|fix|repair|weld|type|sail|surf|fly|bake|whistle|solve|touch-type|fence|ice "
       "skate|skate|unicycle|rollerblade|do (?:a |the "
       ")?(?:handstands?|backflips?|splits|magic)|yodel|beatbox|read "
       "(?:music|braille|lips|tarot|sheet)|walk "
       "on|throw|carve|tie|build|recite|hold my breath|lift|speed[- ]?read|lip[- "
       "]?read|ride|shoot|forage|brew|moonwalk|breakdance|make)\\b[^,;.!?()\\n]{0,40}?)" END},
    {"skill", RULE_LIST,
     I
     "^i (?:" ADVERB
     ")(?:know how to|am able to|learned (?:how )?to|learnt (?:how )?to|taught myself (?:how "
     ")?to|am trained to|am qualified to|am licensed to|am certified to) (?!use this|be\\b)" REST},
    {"skill", RULE_LIST,
     I
     "^i am (?:" ADVERB ")(?:good|great|excellent|skilled|skilful|handy|decent|brilliant|"
     "proficient|experienced|confident|an "
     "expert|a dab hand|trained|a whizz|a wizard) (?:at|in|with) (?!it\\b|this\\b|that\\b|" LANGUAGE
     ")" REST},
    {"skill", 0,
     I
     "^i (?:" ADVERB "|have (?:been )?(?:" ADVERB "))((?:play|playing|played) (?:the |a bit of |"
     "some |jazz |classical |bass |electric |acoustic "
     ")*(?:piano|guitar|violin|cello|flute|drums?|trumpet|sax(?:ophone)?|clarinet|harp|ukulele|"
     "banjo|bagpipes|accordion|organ|bass|double "
     "bass|harmonica|oboe|trombone|tuba|viola|mandolin|fiddle|recorder|keyboards?|sitar|erhu|koto|"
     "shamisen|theremin|french horn|bodhr[aá]n|tin whistle|bassoon|didgeridoo|lute))\\b(?! every)"
     "(?! (?:last|yesterday|once|tonight))"},
    {"skill", RULE_LIST,
     I
     "^i (?:" ADVERB
     ")(?:know|code in|program in|am fluent in|work with|use|write|have experience (?:with|in)|am "
     "(?:good|experienced|proficient|comfortable) (?:at|in|with)|speak) (?:some |a bit of |a "
     "little )?(?-i:(" TOOL "(?:(?:,| and|, and|,? but not)(?: some| a bit of| a little)? " TOOL
     ")*))"},
    {"skill", 0,
     I "^i have (?:an? )?(black belt in [\\p{L} "
       "]+?|(?:pilot's?|forklift|hgv|lorry|boat|scuba|diving|motorbike|motorcycle|sailing) "
       "licen[cs]e)" END},

    {"hobby", 0, I "^i do (amateur [\\p{L} ]{3,25}?)" END},
    {"hobby", RULE_LIST,
     I "^my (?:(?:main|favou?rite|biggest|only|new|current|other|big|great|all-time) "
       ")*(?:hobby|hobbies|pastimes?|pass-time|leisure activit(?:y|ies)) "
       "(?:is|are|include|includes|has always been|would be|remains?) (?!not\\b)" REST},
    {"hobby", RULE_LIST,
     I "^(?!it\\b|this\\b|that\\b|which\\b)" WORDS
       "(?:,? that)? (?:is|has been|are|have been) (?:my (?:main |favou?rite |only |new |biggest "
       ")?(?:hobby|hobbies|pastime))"},
    {"hobby", RULE_LIST,
     I
     "^(?:what i do for fun|my thing|my idea of (?:fun|a good (?:day|time|weekend))|the (?:honest "
     ")?answer|my "
     "(?:guilty |simple )?(?:pleasure|escape|way to (?:relax|unwind|switch off))) is "
     "(?!not\\b)" REST},
    {"hobby", 0,
     I "^(?:my )?(?:weekends?|evenings?|sundays?|saturdays?|free time|spare time) (?:are|is) "
       "(?:for|all about|spent|mostly for|reserved for|usually for) (?!sleep|rest|work|my\\b)"
       "([\\p{L} ]{2,40}?)(?= mostly| mainly| usually|"
       "\\s*$|[,.;])"},
    {"hobby", RULE_LIST,
     I
     "^i (?:spend|pass) (?:most of |all |a lot of )?(?:my )?(?:weekends?|evenings?|free time|spare "
     "time|days off|sundays|saturdays) (?:mostly |usually )?(?!with\\b|at\\b|in\\b|on\\b)" REST},
    {"hobby", RULE_LIST,
     I "^my (?:evenings|weekends|free time|spare time|sundays|nights) (?:go|goes|is spent|are "
       "spent)(?: to| on| into| doing)? "
       "(?!waste|work)" REST},
    {"hobby", RULE_LIST,
     I "^(?!it\\b|this\\b|that\\b)" WORDS
       " is (?:what i do for fun|how i (?:relax|unwind|switch off)|my (?:big )?(?:thing|escape) "
       "outside)"},
    {"hobby", RULE_LIST,
     I "^(?:in my (?:free|spare|leisure) time|(?:on|at) (?:the |most )?weekends?|when i have "
       "time|for fun),? (?:i (?:like to |love to |enjoy |do |mostly |usually "
       "|love |like )?)(?!work|have|am|need|can|will)" REST},
    {"hobby", RULE_LIST,
     I "^i (?:do|practise|practice) (?!not\\b)" WORDS
       " (?:as a hobby|for fun|in my (?:spare|free) time)"},
    {"hobby", RULE_LIST,
     I "^i (?:have (?:" ADVERB ")?(?:taken up|got into|gotten into|started)|" ADVERB
       "(?:took up|got into)|am (?:" ADVERB
       ")an? (?:avid|keen|passionate|amateur|hobby|enthusiastic)) "
       "(?!this|it\\b|the\\b(?! "
       "(?:piano|guitar|violin|sax\\w*|drums|cello|flute|banjo|harp|ukulele|trumpet|accordion))|"
       "a\\b|working|work\\b|my\\b|to\\b|at\\b|as\\b)" WORDS END},
    {"hobby", RULE_LIST,
     I "^i (?:" ADVERB ")((?:collect|go) (?:old |vintage |antique )?(?:stamps|coins|vinyl(?: "
       "records)?|records|comics|postcards|watches|minerals|rocks|toys|figurines|birdwatching|bird "
       "?watching|bouldering|climbing|fishing|hiking|camping|sailing|kayaking|trainspotting|"
       "geocaching|metal detecting|foraging|wild swimming|surfing))\\b(?! (?:every|on))"},

    {"hobby", 0,
     I "^i (?:" ADVERB
       ")?(collect (?!my\\b|the\\b|it\\b|data|from|them|you|a pension)[^,;.!?()\\n]{3,40}?)" END},

    {"owns", 0,
     I "^(?:my|our) "
       "(?:car|motorbike|motorcycle|bike|camera|guitar|phone|laptop|piano|van|campervan|boat|truck|"
       "scooter|printer|computer|tablet|tractor|"
       "violin|synth|keyboard|telescope)(?: at home)? is an? "
       "((?:(?:old|used|vintage|second-hand|\\d{4}) )?" CAP
       "(?: [\\p{Lu}\\d][\\p{L}\\p{N}-]*){0,3})" END},
    {"owns", 0,
     I "^(?:i|we) (?:have )?(?:" ADVERB "(?:got (?:myself|ourselves)|treated (?:myself|ourselves) "
       "to|inherited|own)) (?:an? )(?![^,.]*\\b(?:" ANIMAL_WORDS
       ")\\b)([\\p{L}\\p{N}'-]+(?: [\\p{L}\\p{N}'-]+){0,3}?)" END},
    {"owns", 0,
     I "^(?:my|our) "
       "(?!(?:Mum|Mom|Dad|God|Name|English|French|German|Spanish|Friend)\\b)((?-i:(?:\\p{Lu}[\\p{L}"
       "\\p{N}-]+)(?: (?:\\p{Lu}[\\p{L}\\p{N}-]*|\\d[\\p{L}\\p{N}]*)){1,3}))(?= "
       "(?:is|has|keeps|makes|made|needs|broke|started|just|still|will|wo|won|does|died|got|was)"
       "\\b)"},
    {"owns", 0,
     I "^(?:my|our) ((?:old|vintage|ancient|trusty|second-hand|used|beloved|rusty) "
       "(?-i:\\p{Lu})[\\p{L}\\p{N} -]{1,25}?)(?= (?:won't|will|"
       "is|has|needs|keeps|makes|does|died|broke|started|just)\\b)"},
    {"owns", 0,
     I "^(?:i|we) (?:" ADVERB
       "(?:own|drive|ride|bought|purchased|have|inherited|treated myself to)|have " ADVERB
       "(?:bought|got|owned|inherited|purchased|had)|drive around in|got)(?: my| our)? (?:an? |my "
       "own |this |the |two |three "
       ")?((?:(?!(?:called|and|in|to|that|with|of|on|at|for|been|never|bought|got|just|sold|"
       "purchased|finally)\\b)[\\p{L}\\p{N}'-]+ "
       "){0,4}?(?:car|van|campervan|camper "
       "van|camper|motorbike|motorcycle|scooter|bike|bicycle|e-bike|tandem|moped|truck|pickup|"
       "caravan|motorhome|boat|narrowboat|yacht|sailboat|canoe|kayak|house|flat|apartment|cottage|"
       "cabin|bungalow|farm|allotment|greenhouse|piano|guitar|violin|cello|drum "
       "kit|harp|telescope|camera|sewing machine|3d "
       "printer|printer|laptop|macbook|ipad|iphone|kindle|playstation|xbox|switch|espresso "
       "machine|coffee machine|air fryer|record player|turntable|loom|kiln|pottery "
       "wheel|lathe|tractor|motor|convertible|vespa|harley|tesla|toyota|honda|ford|volvo|bmw|audi|"
       "mini|fiat|vw|volkswagen|subaru|mazda|nissan|hyundai|kia|skoda|renault|peugeot|citroen|jeep|"
       "porsche|steinway|stratocaster|telecaster|leica|nikon|canon|hot "
       "tub|sauna|pool|trampoline|treadmill|wood ?stove|wood "
       "burner|vineyard|orchard|allotment|garden|field|"
       "workshop|barn|plot|woodland|smallholding|beetle|lute|accordion|banjo|saxophone|trumpet|"
       "drone|synth(?:esi[sz]er)?|typewriter|aquarium|beach hut|shed|holiday home|land rover)(?: "
       "(?-i:[\\p{Lu}\\d])[\\p{L}\\p{N}]*)?)\\b(?! "
       "(?:accident|crash|payment|loan|trip|tour|ride|show|lesson|problem|test|interview|rental|"
       "insurance|appointment|service booked|race|centre|center|party|work|path))"},
    {"owns", 0,
     I "^(?:i|we) (?:" ADVERB "(?:own|drive|ride)) (?:an? |the )((?:\\d{4} |old |vintage |used "
       "|second-hand |red |blue |white |black )*" CAP
       "(?: [\\p{Lu}\\d][\\p{L}\\p{N}-]*){0,3})" END},

    {"goal", 0, I "^i am (?:" ADVERB ")(working towards? (?!it\\b|this)[^,;.!?()\\n]{3,50}?)" END},
    {"goal", 0,
     I
     "^(?:one of )?(?:my|the) "
     "(?:(?:main|big|biggest|long-term|ultimate|personal|next|new|current|one|only|life|lifelong|"
     "career|fitness|financial) )*(?:goals?|aims?|dreams?|ambition|target|resolutions?|new year's "
     "resolution|objective|bucket list)(?: (?!is\\b)[^,.]{1,50}?)? is (?:still |always |to |now "
     ")*(?:to )?(?!not\\b)" REST},
    {"goal", 0,
     I "^i am (?:" ADVERB ")((?:studying|training|working|retraining) (?:hard )?to be(?:come)? "
       "[\\p{L} '-]{3,50}?)(?=\\s+(?:at|in|with|through)\\b|" END ")"},
    {"goal", 0,
     I "^i (?:have )?(?:always|long) (?:wanted|dreamt|dreamed|hoped) (?:to|of) "
       "(?!know|ask|say)" REST},
    {"goal", 0,
     I "^i am (?:" ADVERB
       ")((?:saving(?: up| money)?|training|studying|preparing|practi[sc]ing|working "
       "towards?|aiming|fundraising|revising) (?:for|towards?|to) (?!it\\b|this\\b|my exam "
       "tomorrow)[^,;.!?()\\n]{1,80}?)(?=\\s*(?:$|[,;.!?()\\n]|should|\\b(?:and|but|so|because|"
       "which|though|if|when)\\b))"},
    {"goal", 0,
     I "^i am (?:" ADVERB ")(?:trying|hoping|determined|planning|aiming|working hard|on a "
       "mission|working) to (?!(?:figure|find|fix|get "
       "this|understand|decide|write|make|work|remember|book|choose|see|say|do|"
       "use|install|open|print|move this)\\b)" REST},
    {"goal", 0,
     I "^i (?:" ADVERB ")(?:want|hope|plan|aim|intend|dream|aspire|would love one day) (?:to|of) "
       "((?:become|becoming|be(?:ing)? an? |run(?:ning)? an? |open(?:ing)?|start(?:ing)? my "
       "own|learn(?:ing)?(?! how| more| it)|climb(?:ing)?|lose|losing|quit(?:ting)?|give "
       "up|retire|write a "
       "(?:book|novel)|publish|buy(?:ing)? (?:a|my) "
       "(?:house|home|flat|boat|farm)|complete|finish|qualify|get into|travel(?:ling)? "
       "(?:the|around)|see the|visit every|swim the|cycle (?:across|from|around|the)|hike|walk "
       "the|pass "
       "the|save)\\b[^,;.!?()\\n]{0,80}?)(?=\\s*(?:$|[,;.!?()\\n]|\\b(?:and|but|so|because|which|"
       "though|if|when|should)\\b))"},
    {"goal", 0,
     I "^i (?:" ADVERB ")(?:want|hope|plan|aim|intend|would like|am hoping|am planning) to "
       "([^,;.!?()\\n]{3,60}? (?:before i|by (?:the end|20|next|my|summer|spring|christmas|" MONTH
       ")|next (?:year|spring|summer|autumn|fall|winter)|one day|some ?day|this year|in "
       "20\\d\\d|within)"
       "[^,;.!?()\\n]{0,20})(?=\\s*(?:$|[,;.!?()\\n]|\\b(?:and|but|so|because)\\b))"},

    {"habit", 0,
     I "^(?:i|we) (?:(?:also|always|still|usually|really|often|only|just|mostly) )*"
       "(?!have to|need|get paid|can\\b|hear|see\\b|feel|am\\b|wake up "
       "with|think|worry|had\\b|have\\b|love it|hate it|like it|forget|used)([^,;.!?()\\n]{2,60}? "
       "(?:every|each) (?:single |other "
       "|second "
       ")?(?:mon|tues|wednes|thurs|fri|satur|sun)?(?:days?|mornings?|evenings?|nights?|weekends?|"
       "weeks?|months?|years?|summers?|winters?|spring|autumn|lunchtimes?|afternoons?|hours?|"
       "christmas|two weeks)(?:(?: and| or|,) (?:mon|tues|wednes|thurs|fri|satur|sun)days?)*(?: "
       "(?:morning|evening|night|afternoon)s?)?)"},
    {"habit", 0,
     I "^((?:once|twice|three times|four times) (?:a|per) (?:day|week|month|year),? (?:i|we) "
       "(?!have to|need|can\\b|am\\b|get\\b)[^,;.!?:()\\n]{3,60}?)(?=\\s*(?:$|[,;.!?:()\\n]|"
       "\\b(?:and|but|so|because)\\b))"},
    {
        "habit",
        0,
        I "^((?:first thing )?(?:every|each) (?:single |other |second "
          ")?(?:mon|tues|wednes|thurs|fri|satur|sun)?(?:day|morning|evening|night|weekend|week|"
          "month|year|summer|winter|lunchtime|afternoon)(?: "
          "(?:morning|evening|night|afternoon))?(?: at [\\w:.]+| (?:before|after) [a-z]+)?,? "
          "(?:i|we) (?!have to|need|get "
          "paid|can\\b|hear|see\\b|feel|am\\b|wonder)[^,;.!?:()\\n]{1,60}?)(?=\\s*(?:$|[,;.!?:()"
          "\\n]|\\b(?:and|but|so|because|before|after)\\b))",
    },
    {"habit", 0,
     I "^(?:i|we) (?:(?:also|always|still|usually|really|often|only|just|mostly) )*"
       "(?!have "
       "to|need|can\\b|had\\b|am\\b|was\\b|used|work\\b|close|open\\b|are\\b|meet\\b)([^,;.!?()\\n]"
       "{2,50}? (?:on "
       "(?:mon|tues|wednes|thurs|fri|satur|sun)days(?: and "
       "(?:mon|tues|wednes|thurs|fri|satur|sun)days)?|(?:once|twice|(?:three|four|five|six|\\d) "
       "times|one day|two days|three days) (?:a|per|each|every) (?:day|week|month|year)|(?:on "
       ")?weekends|daily|before (?:breakfast|bed|work|school)|at (?:\\d{1,2}(?::\\d\\d)?|five|six) "
       "?(?:am|pm)(?: every [a-z]+)?))" END},
    {"habit", 0,
     I "^(on (?:(?:mon|tues|wednes|thurs|fri|satur|sun)day)s?(?: "
       "(?:morning|evening|night|afternoon)s?)?,? (?:i|we) (?!am\\b|have to|need|"
       "will|can\\b|had\\b|was\\b)[^,;.!?:()\\n]{3,50}?)" PHRASE_END},
    {"habit", 0,
     I "^i (?:always|usually|normally|generally|typically|never miss a) ((?:start my day|begin my "
       "day|go to bed|get up|wake up|take "
       "a|drink|read|walk|run|meditate|skip|swim|cycle|stretch|write|journal|pray|have a "
       "(?:coffee|tea|cup)|do yoga|eat)\\b[^,;.!?()\\n]{0,50}?)" PHRASE_END},

    /* ends */
    {"", RULE_ENDS | RULE_CORRECTS, I "^not (?:any ?more|any longer)()(?=\\W*$)"},
    {"employer", RULE_ENDS | RULE_KIN,
     I "^they (?:let me go|fired me|laid me off|sacked me|made me redundant)()"},
    {"occupation", RULE_ENDS | RULE_KIN,
     I "^they (?:let me go|fired me|laid me off|sacked me|made me redundant)()"},
    {"owns", RULE_ENDS | RULE_CORRECTS,
     I "^(?:i|we) (?:have |just |finally |recently )*(?:sold|got rid of|gave away|scrapped) "
       "(?:it|her|him|that)\\b()"},
    {"owns", RULE_ENDS | RULE_CORRECTS,
     I "^(?:i|we) (?:have )?(?:just )?(?:traded|swapped|exchanged) (?:it|her|him|that)\\b()"},
    {"owns", 0,
     I "^(?:i|we) (?:have )?(?:just )?(?:traded|swapped|exchanged) (?:it|her|him|that)(?: in)? for "
       "(?:an? )?" WORDS END},
    {"likes", RULE_ENDS | RULE_CORRECTS,
     I "^i (?:do not|no longer) (?:really )?(?:like|love|enjoy|want|eat|drink) "
       "(?:it|them|that|those)(?: any ?more| any longer| now|$)()"},
    {"likes", RULE_ENDS,
     I
     "^i (?:no longer|do not|don't|stopped) (?:really )?(?:like|love|enjoy|liking|loving)?(?:ing)? "
     "(?!to\\b)([^,;.!?]{1,40}?) (?:any ?more|any longer|now|these days)\\b"},
    {"likes", RULE_ENDS,
     I "^i (?:no longer (?:like|love|enjoy|care for)|(?:am|have gone) (?:off|over|tired of|sick "
       "of|fed up with|done with)|have lost interest in|went off|stopped liking|am no longer "
       "(?:into|a fan of|keen on|fond of)|have grown tired of|am not (?:into|a fan of|keen on) "
       "(?=[^,;.!?]*any ?more)) ([^,;.!?]{1,40}?)(?= any ?more|" END ")"},
    {"dislikes", RULE_ENDS,
     I "^i (?:no longer (?:hate|dislike|detest|mind)|do not (?:hate|dislike|mind)) "
       "([^,;.!?]{1,40}?)(?= any ?more| now|" END ")"},
    {"residence", RULE_ENDS,
     I "^(?:i|we) (?:no longer live|do not live|moved away|moved out|left|am not living)(?: in| "
       "from)? ?([^,;.!?]{0,30}?)(?: any ?more| now| any longer|$)"},
    {"employer", RULE_ENDS,
     I "^i (?:no longer work|do not work|quit(?: my job)?|left(?: my job)?|resigned|have "
       "(?:left|quit|resigned)|was (?:laid off|fired|let go|made redundant)|got (?:laid "
       "off|fired|let go|made redundant)|retired|stopped working|handed in my notice|am no longer "
       "(?:with|at|working))\\b()"},
    {"occupation", RULE_ENDS,
     I "^(?:i am )?(?:no longer|not) an? (" JOB ")(?: any ?more| any longer|$)"},
    {"occupation", RULE_ENDS,
     I "^i (?:quit(?: my job)?|quit being|gave up (?:teaching|nursing)|stopped working "
       "as|retired)\\b()"},
    {"diet", RULE_ENDS,
     I "^i (?:am no longer|am not|stopped being|gave up being|quit being|do not eat)(?: an?| on "
       "a)? (" DIET ")()"},
    {"diet", RULE_ENDS, I "^(?:so )?(?:i am )?not (?:an? )?(" DIET ") any ?more"},
    {"diet", RULE_ENDS,
     I "^i (?:have )?(?:started|began|went back to) eating "
       "(?:meat|chicken|fish|dairy|cheese|eggs|bacon)()"},
    {"allergy", RULE_ENDS,
     I "^i am (?:no longer|not) allergic to ([^,;.!?]{1,40}?)(?: any ?more|" END ")"},
    {"school", RULE_ENDS,
     I "^i (?:graduated|dropped out|left school|left uni|finished "
       "(?:school|uni|university|college|my degree)|no longer (?:study|go))\\b()"},
    {"pet", RULE_ENDS,
     I "\\b(?:(?:put|putting) ((?-i:\\p{Lu}[\\p{L}-]+)) (?:down|to sleep)|(?:say|said|saying) "
       "goodbye to (?:(?:my|our) [a-z ]{0,20})?((?-i:\\p{Lu}[\\p{L}-]+)|" ANIMAL_WORDS "))\\b"},
    {"pet", RULE_ENDS,
     I "^((?-i:\\p{Lu}[\\p{L}-]+)) (?:died|passed away|ran away|has died|has passed|was put "
       "down|is no longer "
       "with us|crossed the rainbow|is gone|did not make it|went to (?:a new|live with))"},
    {"pet", RULE_ENDS,
     I "^(?:my|our) ([\\p{L} ]{2,30}?) (?:died|passed away|ran away|has died|has passed(?: "
       "away)?|was put down|is no longer with us|crossed the rainbow bridge)"},
    {"pet", RULE_ENDS,
     I "^(?:i|we) (?:no longer have|do not have|gave away|rehomed|lost|had to (?:put "
       "down|rehome|give away))(?: an?| our| my| the)? ((?:" ANIMAL_WORDS
       ")(?: (?-i:[A-Z])\\w+)?)(?: any ?more)?"},
    {"owns", RULE_ENDS,
     I "^(?:i|we) (?:have |just |finally |recently )*(?:sold|got rid of|gave away|no longer "
       "(?:have|own|drive)|do not (?:have|own|drive)|lost|scrapped|crashed|traded in|wrote off)(?: "
       "an?| my| our| the| that)? ([^,;.!?]{2,40}?)(?: any ?more| yesterday| last \\w+|" END ")"},
    {"family", RULE_ENDS | RULE_CORRECTS,
     I "^(?:i|we) (?:got divorced|am divorced|broke up|split up|am getting "
       "divorced|divorced|separated)\\b()"},
    {"hobby", RULE_ENDS,
     I "^i (?:gave up|quit|stopped|no longer (?:do|play|go|practi[sc]e)|have (?:given "
       "up|stopped|quit)|do not (?:do|play|go) (?=[^,;.!?]*any ?more)|am done with)(?: doing| "
       "playing| going)? ([^,;.!?]{2,40}?)(?: any ?more|" END ")"},
    {"", RULE_ENDS,
     I "^i (?:have |just |recently )*(?:gave up(?: on)?|quit|stopped|no longer|(?:given up(?: "
       "on)?)|do not "
       "(?=[^,;.!?]*any ?more)|am done with|dropped|sacked off|packed in)(?: doing| playing| "
       "going| do| play| "
       "go)?(?: the| my| our)? ([^,;.!?]{2,40}?)(?: any ?more| for good|" END ")"},
    {"habit", RULE_ENDS | RULE_CORRECTS, I "^(?:i )?(?:used to|took|did|went|ran|had)\\W*$()"},

    {"", RULE_CORRECTS,
     I "^(?:sorry,? |no,? |wait,? |actually,? )*(?:i meant|make (?:that|it)|that should be|it "
       "should be|i mean) (?:the |an? )?(?!to\\b|that\\b|it\\b|by\\b|the\\b|well)([\\p{L}\\p{N} "
       "'-]{1,30}?)()"
       "(?:, (?:autocorrect|typo|sorry|damn|my bad|silly me)\\b.*)?[.! ]*$"},

    {"note", 0,
     I "^(?:(?:please |can you |could you |will you |would you |pls |also )*(?:remember|(?:a "
       ")?note(?: to "
       "self| for later)?|memori[sz]e|keep in "
       "mind|bear in mind|make a note|take note|do not forget|store|save the fact|for future "
       "reference|note down|jot down|write down)(?: this| for (?:me|next time|later|the "
       "future))?+[,:]?(?: that)?+[,:]?) (?!to\\b|me\\b|this\\b|what\\b|when\\b|how\\b|the "
       "(?:last|previous|above))"
       "([^\\n]{4,150}?)(?:[.!?]|$)"},
    {NULL},
};

static const struct refusal en_message[] = {
    {"instruction", I
     "\\A(?s:.*)\\b(?:(?:sample|fake|dummy|mock|made[- "
     "]up|placeholder|example|fictional|fictitious|"
     "imaginary|invented|test) (?:form|profile|data|customer|person|people|persona|user|id|bio|"
     "record|entry|entries|cv|resume|card|account|text|sentences?|character)|for a (?:mock-?up|"
     "demo|template|handout|test case|unit test|comedy sketch|sketch|skit|costume|play)|fictional "
     "please|lorem ipsum)\\b"},
    {"pretence", I "\\A(?s:.*)\\b(?:for (?:tonight's|this|our|the|my) "
                   "(?:d&d |dnd |rpg )?(?:session|campaign|game|quest)|my (?:d&d|dnd|rpg) "
                   "character|as a (?:bard|wizard|rogue|paladin|ranger in the party))\\b"},
    {"irony",
     I "\\A(?:oh |well |ah |aw "
       ")*(?:great|wow|yay|fantastic|wonderful|brilliant|perfect|lovely|awesome|super|"
       "marvellous|splendid|joy|hooray|hurray|nice|bravo)[,.!…]+ (?s:.*)(?:\\b(?:again|another|"
       "stuck|delay\\w*|traffic|monday|on "
       "hold|broke\\w*|leak\\w*|drill\\w*|soaked|cancel\\w*|overtime|"
       "late|lost|rain\\w*|alarm|crash\\w*|truly|just what|lying there|always wanted|"
       "really love it|love it when|of course)\\b)"},
    {"instruction",
     I "\\b(?:translate|translat\\w+|proofread|proof-read|rephrase|reword|paraphrase|"
       "rewrite|correct|fix|summari[sz]e|check|edit|improve)\\b[^.!?\\n:]{0,60}[:\\n]"},
    {"quotation",
     I "\\b(?:email|e-mail|letter|message|text|note(?! (?:to self|for "
       "(?:later|next|me)|this|that|down)|:)|cv|resume|bio|profile|review|post|tweet|"
       "lyrics?|poem|article|passage|excerpt|transcript|quote|caption|ad|advert|statement|reply|"
       "paragraph|story|says|said|wrote|reads|texted|replied|written|goes|script|dialogue|subtitle)"
       "\\b"
       "[^.!?\\n:]{0,50}:"},
    {"pretence", I "\\b(?:novel|short story|fan ?fic(?:tion)?|screenplay|my "
                   "character|protagonist|narrator|monologue|"
                   "backstory|d&d character|dnd character|first person)\\b[^.!?\\n:]{0,60}[:\\n]"},
    {NULL},
};

static const struct refusal en_sentence[] = {
    {"question", I ", (?:right|no|correct|yeah|eh|huh|don't i|aren't i|didn't i|isn't it|isn't "
                   "he|isn't she)\\s*[?]+"},
    {"irony", I
     "\\b(?:love|adore|enjoy|cherish|thrilled|delighted|living "
     "for|favou?rite)\\b[^.!?]{0,40}\\b(?:on hold|waiting|in "
     "(?:traffic|line|the "
     "rain|meetings?)|queu(?:e|ing)|delay(?:s|ed)?|cancel\\w+|overtime|paperwork|taxes|tax returns|"
     "being (?:ignored|stuck|late|woken|interrupted|charged|blamed|told)|spam|ads|a progress "
     "bar|unpaid|mondays?|deadlines?|"
     "layoffs|commut\\w+|bugs|leaks?|broken|stepping on|at \\d "
     "?[ap]m|(?:two|three|four|five|six)[- ]hours? )\\b"},
    {"irony", I "\\blove that for (?:me|us)\\b|^(?:of course|naturally|typical)[,:]? "
                "(?:my|the|i)\\b.*[!]|(?:[.!?]\\s|^)(?:not|jk|sarcasm|just kidding)[.!]*$"},
    {"irony",
     "🙄|🙃|\\s/s\\b|(?i)\\b(?:yeah,? right|as if|what a (?:treat|joy|delight|surprise|dream|"
     "privilege|pleasure)|just what i (?:needed|wanted|always wanted)|lucky me|simply adore|oh "
     "(?:yes|yeah|great|sure|"
     "joy|wonderful|fantastic|brilliant),? (?:i|because|nothing|another|just|my|sure)|said no ?one "
     "ever|said nobody ever|how "
     "(?:lovely|wonderful|delightful) (?:to|that)|living the dream|my absolute favou?rite "
     "(?:thing|part|way)|because (?:that|"
     "this) is (?:exactly )?what|not\\s*!|totally my idea of|thrilled to be (?:stuck|on "
     "hold)|nothing (?:says|like) [^.]{1,40} (?:at|for) "
     "(?:\\d|three|four|five|two|hours))\\b|^(?i)(?:oh )?(?:sure|right|yeah|of "
     "course|obviously|clearly),? (?:i am|because i am|i just love|i love|i'm|i have|i own|i "
     "totally)"},
    {"pretence", I "^(?:so |ok |okay |and |but |now |well "
                   ")*(?:if|suppose|supposing|imagine|imagining|say i|let's say|lets say|let us "
                   "say|assume|assuming|pretend|what if|hypothetically|in theory|picture this|in "
                   "another life|in my dreams?|"
                   "had i|were i|i wish|if only|as though)\\b"},
    {"pretence", I "\\b(?:in (?:my|a|the) (?:next|past|previous|another|other|parallel) "
                   "(?:life|universe|world)|reincarnat\\w+)\\b"},
    {"pretence", I "\\b(?:i dreamt|i dreamed|in my dream|in (?:the|a|this) "
                   "(?:game|book|story|novel|film|movie|play|series)"
                   "|my character|hypothetical(?:ly)?|fictional|in character|for a role|as a "
                   "joke|the character|the narrator|pretend(?:ing)?)\\b"},
    {"instruction", I "^(?:please |can you |could you |would you |pls |now |then |hey |ok |also "
                      ")*(?:write|draft|compose|translate|"
                      "rewrite|paraphrase|summari[sz]e|proofread|generate|create|invent|say|reply|"
                      "respond|answer|act as|"
                      "pretend|simulate|roleplay|role-play|complete the|finish the sentence|fill "
                      "in|make up|repeat after)\\b"},
    {"quotation",
     I "^(?!.*\\b(?:happy|sad|sorry|glad|proud|ashamed|embarrassed|needless|i would|i will|i'd|i "
       "must) (?:to )?(?:say|tell|admit)\\b)"
       "(?!(?:[\\p{L}' ]* )?i (?:have |had |also |just |already |once |even "
       ")*(?:told|said|mentioned|"
       "explained|think|thought|heard|believe|say|tell)\\b)(?:[\\p{L}' "
       "]{0,40}\\b(?:said|says|say|told|tells|claims?|claimed|thinks?|wrote|writes|texted|"
       "replied|shouted|asked|asks|sings|sang|goes|yelled|insists?|joked|heard|believes)\\b(?! "
       "(?:me )?(?:to|i should)\\b))(?=.*\\b(?:i|my)\\b)(?<!i think)(?<!i say)(?<!i said)"
       "(?!i (?:think|told|said|heard|asked))"},
    {NULL},
};

static const struct refusal en_clause[] = {
    {"transient", I "^(?:i|we) (?!grew|was born|have)[^,]*\\bwhen (?:i|we) (?:was|were)\\b"},
    {"pretence",
     I "^(?:if|unless|suppose|imagine|as if|as though|what if|pretend|assuming|i wish|in case)\\b"},
    {"negation", I
     "^(?:it is |that is |that does |it does |i am )?not (?:that |because |mean(?: that)? )?i\\b"},
    {"negation", I "^i (?:am not|was never|have never|never|do not|did not|have not|have no|am "
                   "no)\\b(?!.*\\b(?:any ?more|any longer|longer)\\b)"
                   "(?! (?:really |much |particularly |too |very )?(?:like|enjoy|care "
                   "for|fancy|love|liked|enjoyed|a (?:big |huge )?fan|into|keen|fond|been (?:a "
                   "fan|into|keen)|eat)\\b)(?!.*\\bonly\\b)"},
    {"transient", I "\\b(?:i (?:would|wouldn't|might|may|could(?! (?:eat|drink|live "
                    "on|watch|listen|read))|should|will|shall|ought|used to|was "
                    "thinking|am thinking|almost|nearly|probably|wonder|guess i|"
                    "am considering|am going to|am gonna|gonna|had to|have to|must))\\b"},
    {"transient", I
     "\\bi (?:am|was|live|am staying|am living|stay) [^,]*\\b(?:for (?:a few|the next|two|three|a "
     "couple of) (?:days|weeks|nights)|(?:this|next) week(?:end)?|on holiday|on vacation|on a "
     "(?:business )?trip|for a conference|until (?:tomorrow|monday|friday|sunday))\\b"},
    {"transient", I "^i (?:love|like|enjoy|hate|am) [^,]*\\b(?:right now|at the moment|this "
                    "(?:song|movie|film|book|app|answer)|your (?:answer|idea|help))\\b"},
    {NULL},
};

static const struct refusal en_expand[] = {
    {"'", "[’‘`]"},
    {"I am", "(?i)\\bi'?m\\b(?! a\\.)"},
    {"I have", "(?i)\\bi'?ve\\b"},
    {"we have", "(?i)\\bwe've\\b"},
    {"we are", "(?i)\\bwe're\\b"},
    {"I had", "(?i)\\bi'd\\b(?= (?:already |just |also )?(?:told|said|been|had|\\w+ed)\\b)"},
    {"changed my name to $1", "(?i)\\bchanged my name[^,.;]{0,20}[,;]? (?:and )?(?:it'?s|it is|so "
                              "it is|to) ((?-i:\\p{Lu}\\p{L}+))"},
    {"",
     "(?i),? (?:of all things|believe it or not|oddly enough|weirdly|funnily enough|strangely),?"},
    {"", "(?i)^(?:ever )?since (?!moving|relocating|we moved|I\\b|my\\b|[A-Z]\\w+ "
         "I)[^,;.]{3,50}?,? (?=I\\b)"},
    {"I have", "(?i)\\bI have got(?= (?:an?|two|three|four|five|my|the|no)\\b)"},
    {"remember that ", "(?i)^(?:a )?note (?:to self|for later|for next time)[:,]\\s*"},
    {"I $1", "(?i)^((?:want|hope|plan) to\\b)"},
    {"I live in $1, ",
     "(?i)\\bwhere I live,? \\(?(?:here )?(?:in|near) ((?-i:\\p{Lu})[\\p{L} -]{2,30}?)[,)] *"},
    {"$1", "(\\d),(?=\\d{3}\\b)"},
    {"my goal is to ", "(?i)^(?:one day|some ?day|eventually|in the long run),? (?:I "
                       ")?(?:would|'d|want|hope|dream|plan) (?:like |love "
                       ")?(?:to|of) "},
    {"my goal is to $1", "(?i)^I(?:'d| would) (?:really )?(?:like|love) to ([^,;.!?]{3,60} (?:one "
                         "day|some ?day|eventually))"},
    {"$1; ", "(?i)^((?:due to|because of|given|with|thanks to) my [^,;.!?]{3,40}?),? (?=I\\b)"},
    {"I $2 $1", "(?i)^(?:I )?used to (?:hate|dislike|loathe) ([^,]{2,30}),? (?:but )?(?:and )?now "
                "I (?:absolutely |really )?(love|like|"
                "adore|enjoy) (?:them|it)\\b"},
    {"they", "(?i)\\b(?:people|someone|anyone|somebody|those|folks|women|men|friend|user|person|"
             "student|guest|kid)s? (?:who|that)\\b"},
    {"I am now $1, ",
     "(?i)(?:^|: ?)([1-9]\\d), (?=(?:[\\p{L}]+ "
     "(?:born|based|native)|born|from|based|living|single|married|divorced|widowed|male|"
     "female|retired|mother|father|mum|mom|dad)\\b)"},
    {"I speak ",
     "(?i)\\b(?:I )?(?:grew up|was raised) (?:bi|tri|multi)lingual[,:]? (?:in |with |speaking )?"},
    {"I speak ", "(?i)\\bI am (?:bi|tri|multi|quadri)lingual\\s*[:,(]\\s*(?=[A-Z])"},
    {"I am allergic to ", "(?i)^my (?:food )?allergies(?: are| include)?:? "},
    {"my goal is ", "(?i)\\b(?:my |the |this year's |next year's |current |big |new year's "
                    ")*(?:goal|aim|dream|resolution|ambition)(?: for "
                    "[^:,.]{2,20})?: (?:to )?"},
    {"", "(?i)^(?:(?:a few|two|three|four|five|ten|many|\\d+) )?(?:years?|months?|weeks?) ago,? "
         "(?=(?:I|my)\\b)"},
    {"", "(?i)^(?:once|lately|nowadays|(?:this|last|next) "
         "(?:year|spring|summer|autumn|winter|month)|in (?:19|20)\\d\\d|as a "
         "(?:kid|child|teenager)),? (?=(?:I|my)\\b)"},
    {"I $1", "(?i)^((?:just |finally )?(?:bought|inherited|purchased|sold) "
             "(?:an?|my|our)\\b|(?:gave up|quit|ditched|dropped) (?:the|my)?)"},
    {"I work as $1", "(?i)\\b(?:the |my )?(?:day job|job|profession|occupation) ?[:=] ?((?:an? "
                     ")?[\\p{L} -]{3,30})"},
    {"I would", "(?i)\\bi'd\\b"},
    {"I will", "(?i)\\bi'll\\b"},
    {"can not", "(?i)\\bcan'?t\\b|\\bcannot\\b"},
    {"do not", "(?i)\\bdon'?t\\b"},
    {"did not", "(?i)\\bdidn'?t\\b"},
    {"does not", "(?i)\\bdoesn'?t\\b"},
    {"have not", "(?i)\\bhaven'?t\\b"},
    {"am not", "(?i)\\bain't\\b"},
    {"I do not", "(?i)^(?:honestly |really |but |and |nah |no )*(?:scrap that,? )?do not"
                 "(?= (?:really )?(?:like|eat|live|work|have|enjoy)\\b)"},
    {" is",
     "(?i)(?<=\\bname|\\bthat|\\bit|\\bhere|\\bthere|\\bbirthday|\\bhe|\\bshe|\\bwhat|"
     "\\bhobby|\\bgoal|\\bflat|\\bhouse|\\bplace|\\bhome|\\bdog|\\bcat|\\bson|\\bnames)'s\\b"},
    {"I am allergic to $1", "(?i)\\bno ([\\p{L} ]{2,25}?)(?: tho| though| please)?,? (?:because "
                            "|as |cos )?I am (?:\\w+ )?allergic(?: to (?:it|them|that))?\\b"},
    {" is",
     "(?i)(?<=name|that|it|here|there|birthday|bday|hobby|goal|dream|job)(?<=[a-z])'?s\\b(?<='s)"},
    {"I $1", "(?i)^(?:honestly,? |ugh,? |yeah,? |yes,? |so,? |and |but |oh,? |no,? |btw,? |also,? "
             "|fyi,? |well,? |tbh,? |just |hi,? |hey,? )*\\b(can not (?:stand|bear|get enough "
             "of|live without)|moved to|moved "
             "from|am allergic|live in|lived in|work (?:as|for|at|in)|love "
             "(?!letters?|story|stories|songs?|it|you|is|that|this)|hate (?!it|that|this|to)|adore "
             "(?!it)|own an?|got (?:an?|two|three) (?=[a-z]+ (?:called|named))|grew up in|was "
             "born|(?:just )?turned \\d)"},
    {"I have $1", "(?i)^(never (?:been|liked|enjoyed)|always (?:loved|hated|liked|been))\\b"},
    {"remember that ", "(?i)^for future reference[,:] "},
    {"I have $1", "(?i)^(?:honestly,? |ugh,? |yeah,? |yes,? |so,? |and |but |oh,? |no,? |btw,? "
                  "|also,? |well,? )*\\b(been "
                  "(?:an?|living|working|vegan|vegetarian|veggie|teaching|playing|learning|married|"
                  "with|in|based)\\b)"},
    {"I am $1", "(?i)^(working (?:[a-z]+ly |[a-z]+[- ]time |nights )?(?:as|for|at)\\b|(?:currently "
                "|now )?(?:freezing|sweating|stuck|"
                "settled|retired) in (?-i:(?=[A-Z])))"},
    {"I am $1",
     "(?i)^(?:honestly,? |ugh,? |yeah,? |yes,? |so,? |and |but |oh,? |no,? |btw,? |also,? |well,? "
     ")*\\b((?:(?:really|severely|badly|deathly|highly) )?allergic to|living in|working "
     "(?:as|for|at)|doing my|studying|based in|obsessed with|saving up|training for|fluent in|from "
     "(?-i:(?=[A-Z]))|originally from|currently (?:living|working|studying))"},
    {"I $2 $1",
     "(?i)^(?![^,]*\\b(?:me|is|are|my|i|we|it|to|do)\\b)((?:[\\p{L}'-]+ ){0,3}[\\p{L}'-]+), (?:I "
     ")?(?:just |really |absolutely |simply )*((?:hate|love|adore|"
     "can not stand|loathe|detest|dislike|like) "
     "(?=them|it|those|that))(?:them|it|those|that)\\b(?! when| "
     "if| how)"},
    {"I was $1", "(?i)^(born (?:on|in|and)\\b)"},
    {"I am $1", "(?i)^(not (?:a (?:big |huge )?fan of|into|keen on|fond of)\\b)"},
    {"I $1", "(?i)^((?:just )?(?:started at|joined|started working|grew up)\\b)"},
    {"$1 that ", "(?i)^((?:please |also )*(?:remember|note|keep in mind|memori[sz]e))(?: "
                 "this)?[:,] (?:that )?"},
    {"I am allergic to $1", "(?i)\\bno ([\\p{L} ]{2,25}?)(?: tho| though)?(?:,? please)?,? "
                            "(?:because |as |cause )?I am (?:\\w+ )?allergic(?! to \\w{5})"},
    {"remember that $1",
     "(?i)^(?!please|remember|can\\b|could\\b|what|how)([^\\n]{4,150}?),? (?:so |and )?(?:please "
     "|can you |could you |just )*(?:remember (?:that|this|it)|keep (?:that|this|it) "
     "in mind|do not forget (?:that|this|it)|make a note of (?:that|this|it))(?: for (?:me|next "
     "time|later))?[.!? ]*$"},
    {"I am allergic to $1", "(?i)\\bI can not (?:eat|have|drink) ([\\p{L} ]{2,25}?),? (?:because "
                            "|as |since )?I am (?:\\w+ )?allergic(?! to)"},
    {NULL},
};

/* Values have the contractions of the message. */
static const struct refusal en_contract[] = {
    {"I'm", "I am"},
    {"I've", "I have"},
    {"don't", "do not"},
    {"can't", "can not"},
    {"doesn't", "does not"},
    {"I'll", "I will"},
    {NULL},
};

static const struct refusal en_asked[] = {
    {"my birthday is ", I "\\b(?:birthday|date of birth|when (?:were|was) you born)\\b[^.!]*\\?"},
    {"my goal is ", I "\\byour (?:main |biggest |current )?(?:goal|aim|target|dream)\\b[^.!]*\\?"},
    {"my name is ", I "\\b(?:your name|call you|are you called)\\b[^.!]*\\?"},
    {"I am now ", I "\\b(?:how old are you|your age)\\b[^.!]*\\?"},
    {"I live in ",
     I "\\b(?:where (?:do|are) you (?:live|living|based)|(?:city|town|country|place)[^.!?]* you "
       "(?:live|living|based))\\b[^.!]*\\?"},
    {"I come from ", I "\\bwhere (?:are you|do you come|were you born)\\b[^.!]*\\?"},
    {"I work as ", I "\\b(?:what do you do (?:for|as)|your (?:job|occupation|profession)|line of "
                     "work)\\b[^.!]*\\?"},
    {"I am allergic to ", I "\\b(?:allergies|allergic)\\b[^.!]*\\?"},
    {"I am ", I "\\b(?:dietary|diet\\b|eat meat|vegetarian)[^.!]*\\?"},
    {"my hobby is ", I "\\b(?:your hobb|hobbies|free time|spare time|for fun)\\w*\\b[^.!]*\\?"},
    {"I have ", I "\\b(?:pets|a pet|siblings|children|kids)\\b[^.!]*\\?"},
    {"I work for ", I "\\b(?:who do you work for|which company|where do you work)\\b[^.!]*\\?"},
    {"I study at ", I "\\bwhere do you (?:study|go to (?:school|college|university))\\b[^.!]*\\?"},
    {"I drive a ", I "\\bwhat (?:car )?do you drive\\b[^.!]*\\?"},
    {"I speak ", I "\\b(?:which|what) (?:other )?languages?\\b[^.!]*\\?"},
    {"I can not stand ", I "\\b(?:hate|dislike|do not like|can't stand|don't like)\\b[^.!]*\\?"},
    {"I love ", I "\\b(?:favou?rite|love|like to eat|enjoy|resist)\\b[^.!]*\\?"},
    {NULL},
};

#define EN_VERB                                                                                    \
    "live|lived|work|worked|speak|play|love|like|hate|enjoy|prefer|own|drive|ride|study|teach|"    \
    "run|"                                                                                         \
    "swim|go|collect|took up|turned|got into|joined|adore|detest|grew "                            \
    "up|moved|was|am|have|can|do "                                                                 \
    "not|suffer|come|want|hope|plan|can "                                                          \
    "not|went|eat"
const struct memory_rules memory_rules_en = {
    .facts = en_facts,
    .message = en_message,
    .sentence = en_sentence,
    .clause = en_clause,
    .expand = en_expand,
    .asked = en_asked,
    .contract = en_contract,
    .role_play =
        I "\\b(?:role[- ]?play|(?:write|make|tell|continue|start) (?:a|our|the|this) story "
          "together|story together|your turn[.!]|"
          "you(?: are|'re) (?-i:\\p{Lu}\\p{L}+),? (?:and )?i(?: am|'m) (?-i:\\p{Lu})|let'?s "
          "(?:pretend|play|imagine|act)\\b|you(?:'re| are) my (?:first "
          "mate|boss in this|"
          "servant|squire|patient)|you play|i'?ll (?:play|be) (?:the|an?) [a-z]+ and you|you be "
          "the|pretend (?:that )?(?:you|i|we)\\b|act as my|be my interviewer|interview me|you(?: "
          "are|'re) (?!an? "
          "(?:ai|bot|assistant|llm|model)|my (?:best|fav)|the (?:best|only))(?:an?|the|my) "
          "[a-z]+,? (?:and )?i(?: am|'m) (?:your|an?|the)\\b|mock interview|you ask the "
          "questions|i'?ll be "
          "[a-z]+,? (?:an?|the|and you)\\b|you(?: will|'ll|'re| are)? be (?:the|my) [a-z]+ and "
          "i|act as if i|stay in character|in this (?:scenario|"
          "story|game|scene),? i|make[- ]believe)",
    .role_play_end = I "\\b(?:end of (?:the )?(?:role[- ]?play|game|story|scene)|stop "
                       "(?:pretending|the role[- ]?play|playing)|out of "
                       "character|back to reality|enough (?:pretending|role[- ]?play|of the "
                       "game)|ooc|game over|role[- ]?play (?:is )?over)\\b",
    .real = I "\\b(?:in real life|irl|for real|the real me|real[- ]life me|outside (?:the|this) "
              "(?:game|story|novel)|in reality|actual me|me personally|myself in reality)\\b",
    .split = I
    "\\s*[;:—–()]+\\s*|\\s+-+\\s+|\\.{2,}\\s*|,?\\s+(?:but|because|cause|cuz|whereas|"
    "although|though|tho|so that|who|while|whilst|"
    "however|hence|except "
    "that)\\s+|,\\s*(?:so|which|where|since|as)\\s+|,?\\s+(?:and|so|since|as|now "
    "that|plus|given)(?: "
    "that)?\\s+(?=(?:i|my|we|he|she|it|they|you|his|her|their|our|everyone|nobody|last|now|"
    "then|today)\\b)|"
    ",?\\s+and\\s+(?=(?:also |now |still |really |just |recently )*(?:" EN_VERB
    ")\\b)|,\\s*(?=(?:i|my|we|he|she|it|they|you|his|her|their|our|any|what|how|which|where|"
    "who|why|when|can|could|do|does|is|are|should|would|been|born|allergic|living|working|"
    "originally|currently|as|both|recently|me|tastes?|actually|now|nowadays|these days|since|"
    "honestly|believe|please|not|never|no|got|saving|training|moved)\\b(?! (?:[a-z]+ "
    "){0,2}?(?:" ANIMAL_WORDS "|" RELATIONS ")(?:,|$)))|,\\s+and\\s+(?=(?:"
    "last|today|this|the|that)\\b)|,?\\s+and\\s+(?=the [a-z ]{1,20} is\\b)|,?\\s+and\\s+(?=\\d\\d "
    "years? old\\b)|"
    ",\\s*(?=[^,.!?]*[?？]\\W*$)(?!right\\b|is\\b|isn't|no\\b|huh|ok\\b|yes|yeah|correct|do "
    "not|don't|am i|eh\\b|"
    "aren't|or\\b|and\\b)|,?\\s+(?:and|so)\\s+(?=(?:what|how|which|where|when|why|can|could|should|"
    "is there|do|"
    "does|any)\\b)|"
    ",\\s*(?=\\d\\d\\s*(?:,|$)|(?:my )?(?:date of "
    "birth|dob|birthday|bday)\\b)|(?<=\\b\\d\\d),\\s*|,\\s*(?=[\\p{L} -]{3,40}\\W*$)(?=(?:" JOB
    ")\\W*$)|,\\s*(?=[\\p{L} ]{3,30} by (?:trade|profession))|\\s+so\\s+(?=\\d\\d\\b)|,\\s+(?:and "
    ")?(?=with my\\b|the only\\b|turning\\b|nothing\\b|seriously\\b)",
    .filler = I
    "^(?:yo|hiya|(?:hello|hi|hey) "
    "(?:there|all|everyone)|and|but|so|ok|okay|well|oh|hey|hi|hello|yes|yeah|yep|no|nah|nope|"
    "actually|honestly|"
    "btw|by the way|fyi|just so you "
    "know|for the record|for context|some (?:background|context)|as for "
    "me|also|plus|anyway|anyways|personally|in fact|to be honest|tbh|"
    "believe it or not|i should (?:mention|add|say)(?: that)?|i must "
    "(?:admit|say)|since(?= (?:i|my|we)\\b)|because|cause|given(?: that)?|now that|seeing as|you "
    "should know"
    "(?: that)?|you know|the thing is|thing is|fun fact|about me|a bit about me|i guess|i "
    "think|basically|obviously|luckily|sadly|unfortunately|"
    "lol|haha|ugh|argh|hmm|um|uh|right|sure|thanks|thank you|thx|cheers|sorry|wait|no "
    "wait|oops|correction|update|update on the above|to clarify|just to clarify|"
    "fwiw|ngl|originally(?= i am from)|not gonna lie|to be fair|on top of that|besides|then|that "
    "said|good morning|good evening|hello there|hi there|"
    "as you know|as i said|like i said|like|the reason i am asking is(?: that)?|i have to "
    "say|i will admit|i admit|me|i mean|"
    "now(?= (?:i |my |work|live|study|am))|my mistake|scratch that|scrap that|forget "
    "that|ignore that|dear assistant|greetings|in case you need "
    "it|in real life|irl|real life me|outside the story|the only thing(?= i am "
    "allergic)|these days|nowadays|currently|at the moment|technically|heads up|before "
    "that|before i forget|in reality|what i (?:told you|said|"
    "meant) is(?: that)?|i am (?:proud|glad|happy|sorry|afraid|lucky|embarrassed|told)(?: to "
    "say)?(?: "
    "that)?(?= i\\b| my\\b)|i (?:have |had |also |just |already |even "
    ")*(?:told|mentioned|explained|"
    "said)(?: to)?(?: (?:you|him|her|them|everyone|people|[a-z]+ [a-z]+))?(?: that)?(?= i "
    "(?:am|have|"
    "live|work)\\b| my\\b)|(?:what happened|the problem|the issue|the trouble|the reason|the "
    "truth|the "
    "fact|the catch|problem) is(?: that)?|"
    "it (?:does not help|helps) that|keep in mind(?: that)?(?= i "
    "(?:am|have)\\b)|considering(?: that)?|"
    "long story short|background|quick intro|bit about me|right|new here|first time here|"
    "hope that helps|all good|good news|bad news|small correction|"
    "(?:as of|since|from) (?:last |this |early |late )?[a-z0-9]+(?=,? (?:i|my)\\b)|last "
    "(?:year|month|week)|this year|recently|please (?=call "
    "me))\\b[,:;.!]*\\s+",
    .self = I
    "^(?:i|(?:with|given|because of|due to) my|the (?:honest |short )?answer|my (?!(?:" RELATIONS
    "|mum|mom|dad|mother(?! tongue)|father|boss|friend|best "
    "friend|flatmate|roommate|housemate|neighbou?r|colleague|co-?worker|teacher|doctor|"
    "landlord|manager|uncle|aunt|cousin|gran\\w*|ex|parents?|team|client|buddy|mate|"
    "partner|in-laws?)\\b)|we|me)\\b",
    .third = I
    "^(?:he|she|they|his|her|their|(?:everyone|everybody|people)(?! calls? "
    "me)|someone|somebody|nobody|one of|"
    "(?:my|our|the|a|an|that|this|his|her|their|some)\\s+(?:[\\p{L}-]+ ){0,3}?(?:" RELATIONS
    "|mum|mom|dad|mother(?! tongue)|father|boss|friend|flatmate|roommate|housemate|neighbou?r|"
    "colleague|co-?worker|teacher|doctor|landlord|manager|uncle|aunt|auntie|cousin|gran\\w*|ex|"
    "parents?|team|client|buddy|mate|guy|man|woman|lady|bloke|kid next door|classmate|"
    "in-laws?|intern|students?|patients?|colleagues|friends|neighbou?rs|classmates|guests|"
    "customers|clients|coworkers|tutor|trainer|professor|hairdresser|driver|customer|guest|"
    "date(?! of)|crush|nan|nana)(?:'s)?)\\b(?!'s name|’s name)(?! (?:is )?(?:called|named))(?! is "
    "my\\b)",
    .question =
        I "^(?!(?:please |hey |ok |so )*(?:can|could|will|would) you (?:please |also "
          ")?(?:remember|note|keep in "
          "mind|make a note)\\b)(?!what i "
          "(?:love|like|enjoy|adore)\\b(?!.*[?？]))(?:(?s:.*)[?？][^\\p{L}]*$|(?:so |and |but |ok "
          "|hey |hi "
          ")*(?:what|who|where|when|why|how|which|do|does|did|is|are|can|could|would|should|"
          "am|was|were|will) "
          "(?:i|my|you|it|the|this|that|we|there|they|he|she|is|are|do|does|should|would|can|"
          "to|many|much|kind|a|an)\\b)",
    .question_clause =
        I "^(?:so |and |but |then |now |is |any |got any "
          ")*(?:what|who|where|when|why|how|which|do|does|did|is|are|can|could|would|should|am|was|"
          "were|will|any|anyone|shall|may|might|"
          "recommend|suggest)\\b|\\b(?:right|isn't it|don't you think|you know)[?]*$",
    .list =
        I "\\s*(?:[,;/]|\\band\\b|\\bor\\b|\\bas well as\\b|\\bplus\\b|\\balong "
          "with\\b)(?:\\s*(?:and|also|or|especially|above all|particularly|a bit of|a "
          "little|an?(?= (?:baby|toddler|newborn|daughter|son|sister|brother|dog|cat)\\b)))?\\s*",
    .join = I "[.!]\\s+(?=(?:please |can you |could you |just )*(?:remember (?:that|this|it)|keep "
              "(?:that|this|it) in "
              "mind|don't forget (?:that|this|it)|make a note of (?:that|this|it)|note "
              "(?:that|this) down)(?: for (?:me|next time|later))?(?:[.!?,]|\\s*$))",
    .continues = I "^(?:(?:also|now|still|really|just|recently|usually|mostly|sometimes|only|"
                   "mainly|currently) )*(?:" EN_VERB ")\\b",
    .bearer_family = I "^(?:my|our) " RELATION "\\b(?!'s)",
    .bearer_pet = I "^(?:my|our) (?:[a-z-]+ ){0,2}?" ANIMAL "\\b(?!'s)",
    .amends =
        I "\\b(?:typo|auto-?correct|misspelled|misspelt|spell(?:ed|ing|check)|i meant|correction|"
          "wrong name|to be (?:exact|precise|specific)|not (?-i:\\p{Lu})\\p{L}+|sorry,? (?:it's|it "
          "is|i mean)|mix(?:ed)? (?:it|them) up|with an? "
          "[a-z]\\b|not [\\p{L}]+, (?:but )?[\\p{L}]+)\\b",
    .trim = I
    "^(?:on |in )?the "
    "(?:outskirts|edge|middle|heart|centre|center|north|south|east|west|suburbs|coast) of "
    "|^(?:just outside|outside of|outside|close "
    "to|near|an?|the|some|both|really|very|my|to|also|especially|anything with|all things|all "
    "kinds "
    "of|any kind of|being|absolutely|definitely|probably|still|always|just|lots of|good old|of) |"
    " (?:too|after all|now|though|tho|lol|haha|myself|a lot|so much|very much|at "
    "all|either|anyway|btw|actually|really|personally|the most|more than anything|as "
    "well|again|please|any ?more|with (?:every|all|a) .*|these days|most|for "
    "sure|obviously|honestly|mostly|mainly|since .*|for "
    "(?:years|ages|now|over|about|almost|nearly).*|ever|in general|to (?:bits|pieces|death|me)|or "
    "anything.*|or something.*|and stuff|etc|in particular|and nothing else|and that is it|only|if "
    "anything)$",
    .no_item = I "^\\s*(?:\\S+\\s+){3}\\S|^\\s*(?:recommend|suggest|just|not|but|nothing|weird|"
                 "which|what|how|why|any|"
                 "please|help|thanks|since|because|so|hence|no|never|then|also|it|they|he|she|we|"
                 "you|in that order|"
                 "anything|everything|the|a|an|my|with|from|preferably|ideally|obviously)\\b|^(?:"
                 "\\w+ )?(?:love|like|hate)s? (?:it|them)\\b",
    .count = I "^(?:two|three|four|five|six|seven|\\d+|several) ",
    .no_value = I "^(?:the "
                  ")?(?:taste|smell|idea|sound|look|way|fact|feeling|thought|texture)$|^(?:nothing|"
                  "seriously|none|no|not|used to|nope|half|such|how|what|why|recommend) |^(?:hands "
                  "down|by far|by miles|for sure|no "
                  "contest|always have.*|obviously)$|"
                  "^(?:it|this|that|them|you|him|her|me|i|one|so|not|none|nothing|something|"
                  "anything|everything|everyone|people|things?|stuff|.|the|there|here|yes|no|both|"
                  "other|others|more|much|lot|lots|then|now|work|all|what|who)$"
                  "|^(?:i|he|she|they|we|my "
                  "(?:sister|brother|friend|wife|husband|boss|mum|mom|dad)|you|it|that|if) "
                  "(?=\\p{L})|\\x{fffc}|\\b(?:is|are|was|were|doesn't|hates|loves|likes)\\b",
};
