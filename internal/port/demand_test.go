// SPDX-License-Identifier: Apache-2.0

package port

import (
	"strings"
	"testing"
)

func TestParseDemand(t *testing.T) {
	for _, c := range []struct {
		in   string
		want Demand
		text string
	}{
		{"web:80", Demand{Slot: Slot{TCP, 80}, Name: "web"}, "web:80/tcp"},
		{"dns:53/udp", Demand{Slot: Slot{UDP, 53}, Name: "dns"}, "dns:53/udp"},
		{"shop/web:80/tcp", Demand{Slot: Slot{TCP, 80}, Scope: "shop", Name: "web"}, "shop/web:80/tcp"},
		{"svc/default/web:65535", Demand{Slot: Slot{TCP, 65535}, Service: true, Scope: "default", Name: "web"}, "svc/default/web:65535/tcp"},
		{"svc:80", Demand{Slot: Slot{TCP, 80}, Name: "svc"}, "svc:80/tcp"}, // a container may have this name
	} {
		if d, err := ParseDemand(c.in); err != nil || d != c.want || d.String() != c.text {
			t.Errorf("ParseDemand(%q) = %+v (%q), %v; want %+v", c.in, d, d, err, c.want)
		}
	}
	for in, want := range map[string]string{
		"web":                             "no port",
		"web:":                            `port "" is not`,
		"web:0":                           `port "0" is not`,
		"web:65536":                       "is not from 1 to 65535",
		"web:080":                         "is not from 1 to 65535",
		"web:+80":                         "is not from 1 to 65535",
		"web:http":                        "is not from 1 to 65535",
		"web:80/sctp":                     `protocol "sctp" is not`,
		"web:80/":                         `protocol "" is not`,
		"web:80/TCP":                      `protocol "TCP" is not`,
		":80":                             "a name has",
		"/web:80":                         "a name has",
		"svc/web:80":                      "a Service has a namespace and a name",
		"svc/a/b/c:80":                    "a Service has a namespace and a name",
		"a/b/c:80":                        "too many names",
		"w*b:80":                          "a name has",
		"w b:80":                          "a name has",
		"w\nb:80":                         "a name has",
		"[::1]:80":                        "no name",
		"8080:80":                         "8080 is a port or an address, and no name",
		"127.0.0.1:80":                    "127.0.0.1 is a port",
		"Localhost:80":                    "no name",
		strings.Repeat("a", 254) + ":80":  "not too long",
		strings.Repeat("a", 129) + "/b:1": "not too long",
	} {
		if d, err := ParseDemand(in); err == nil || !strings.Contains(err.Error(), want) || !d.IsZero() {
			t.Errorf("ParseDemand(%q) = %+v, %v; want an error with %q", in, d, err, want)
		}
	}
}

func FuzzParseDemand(f *testing.F) {
	for _, s := range []string{"web:80", "shop/web:80/udp", "svc/default/web:80/tcp", "svc/web:1", ":", "a:b:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := ParseDemand(s)
		if err != nil {
			return
		}
		if again, err := ParseDemand(d.String()); err != nil || again != d {
			t.Errorf("%q is %q, which is %+v, %v; want %+v", s, d, again, err, d)
		}
		if len(d.String()) > 400 || d.Port == 0 || strings.ContainsAny(d.String(), "*?\n\" ") {
			t.Errorf("%q is %q", s, d)
		}
	})
}
