/* Formats of JSON Schema as expressions over the whole text. They are as strict as the RFCs that they
 * come from where that is a regular language; a date is a day of the calendar. */
#include <string.h>

#include "grammar/schema.h"

#define MONTH_DAY                                                                                                      \
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
#define LEAP_YEAR "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
#define DATE      "([0-9]{4}-" MONTH_DAY "|" LEAP_YEAR "-02-29)"
#define TIME      "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define LABEL     "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define HOST      LABEL "(\\." LABEL ")*"
#define OCTET     "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define IPV4      OCTET "\\." OCTET "\\." OCTET "\\." OCTET
#define H16       "[0-9a-fA-F]{1,4}"
#define HEX(n)    "[0-9a-fA-F]{" #n "}"
#define URI_CHARS "[A-Za-z0-9._~:/?#@!$&'()*+,;=%\\[\\]-]"

static const struct {
    const char *name, *expression;
} FORMATS[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "T" TIME},
    {"duration", "P(([0-9]+Y)?([0-9]+M)?[0-9]+D|([0-9]+Y)?[0-9]+M|[0-9]+Y|[0-9]+W|"
                 "(([0-9]+Y)?([0-9]+M)?([0-9]+D)?)T(([0-9]+H)?([0-9]+M)?[0-9]+S|([0-9]+H)?[0-9]+M|[0-9]+H))"},
    {"email", "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@" HOST},
    {"hostname", HOST},
    {"ipv4", IPV4},
    {"ipv6", "((" H16 ":){7}" H16 "|(" H16 ":){1,7}:|(" H16 ":){1,6}:" H16 "|(" H16 ":){1,5}(:" H16 "){1,2}|(" H16
             ":){1,4}(:" H16 "){1,3}|(" H16 ":){1,3}(:" H16 "){1,4}|(" H16 ":){1,2}(:" H16 "){1,5}|" H16 ":(:" H16
             "){1,6}|:((:" H16 "){1,7}|:))"},
    {"uuid", HEX(8) "-" HEX(4) "-" HEX(4) "-" HEX(4) "-" HEX(12)},
    {"uri", "[A-Za-z][A-Za-z0-9+.-]*:" URI_CHARS "+"},
};

const char *schema_format(const char *name)
{
    for (size_t i = 0; name && i < sizeof(FORMATS) / sizeof(FORMATS[0]); i++)
        if (!strcmp(FORMATS[i].name, name))
            return FORMATS[i].expression;
    return NULL;
}
