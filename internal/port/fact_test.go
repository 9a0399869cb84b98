// SPDX-License-Identifier: Apache-2.0

package port

import (
	jsonv1 "encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
)

// filler sets all of a value. Calls of leaf are with the path of each part that is not made of others.
type filler struct {
	text string
	many int // elements of a list
	leaf func(path string, v reflect.Value)
}

func (f filler) fill(path string, v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *netip.Addr:
		*x = netip.MustParseAddr("10.0.0.1")
	case *netip.AddrPort:
		*x = netip.MustParseAddrPort("127.0.0.1:80")
	case *time.Time:
		*x = time.Unix(1, 0)
	case *Reason:
		var list []Reason
		for i := range f.many {
			list = append(list, Because(FromSources, fmt.Sprint(i)+f.text))
		}
		*x = Join(list...)
	case *Detail:
		*x = NewDetail("line")
	default:
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				f.fill(path+"."+v.Type().Field(i).Name, v.Field(i))
			}
			return
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			f.fill(path, v.Elem())
			return
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), f.many, f.many))
			for i := range f.many {
				f.fill(path, v.Index(i))
			}
			return
		case reflect.Map:
			v.Set(reflect.ValueOf(map[string]string{}))
			for i := range f.many {
				v.SetMapIndex(reflect.ValueOf(fmt.Sprint(i)+f.text), reflect.ValueOf(f.text))
			}
		case reflect.String:
			v.SetString(f.text)
		case reflect.Bool:
			v.SetBool(true)
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			v.SetUint(1)
		case reflect.Int64:
			v.SetInt(1)
		default:
			panic(path + ": a kind that the test does not know: " + v.Kind().String())
		}
	}
	f.leaf(path, v)
}

// without returns a value whose nth part is not set, and the path of that part, empty for none.
func without[T any](n int) (v T, path string) {
	at := 0
	f := filler{text: "x", many: 1, leaf: func(p string, part reflect.Value) {
		if at++; at == n {
			part.SetZero()
			path = p
		}
	}}
	f.fill("", reflect.ValueOf(&v).Elem())
	return v, path
}

// everyFieldCounts tests an equality: a value without one part differs from one with it.
func everyFieldCounts[T any](t *testing.T, equal func(a, b T) bool, but ...string) {
	t.Helper()
	all, _ := without[T](0)
	if again, _ := without[T](0); !equal(all, again) {
		t.Errorf("%T is not equal to itself", all)
	}
	for n := 1; ; n++ {
		v, path := without[T](n)
		if path == "" {
			return
		}
		if equal(all, v) != slices.Contains(but, path) || equal(v, all) != slices.Contains(but, path) {
			t.Errorf("%T without %s: equal %v", v, path, equal(all, v))
		}
	}
}

func TestEveryFieldCounts(t *testing.T) {
	everyFieldCounts(t, Fact.Equal)
	everyFieldCounts(t, Publication.Equal, ".Observed")
	everyFieldCounts(t, SinkOutcome.Equal, ".Outcome.Since")
}

// What Fit returns a receiver takes, and gets all of it, however long the texts and lists are.
func TestFitsAreAccepted(t *testing.T) {
	for _, c := range []struct {
		text string
		many int
	}{{"", 0}, {"x", 1}, {"\xffü", 3}, {strings.Repeat("ü", MaxName), 10}, {strings.Repeat("\xff", 2000), 3}, {"x", 400}} {
		for _, allow := range []bool{true, false} {
			var f Fact
			filler{c.text, c.many, func(string, reflect.Value) {}}.fill("", reflect.ValueOf(&f).Elem())
			f.Protocol, f.Port = TCP, 80
			f.Decision.Allow, f.Decision.Rule.OnHost = allow, false
			f.Decision.Host = f.Decision.Host[:min(c.many, MaxHosts)]
			for i := range f.Named.Demands {
				f.Named.Demands[i] = fmt.Sprintf("web:%d/tcp", i+1)
			}
			for i := range f.Others {
				f.Others[i].Rival = i%2 == 1
			}
			sent := f.Fit()
			if err := sent.Check(allow); err != nil {
				t.Errorf("%d of %.8q, allowed %v: %v", c.many, c.text, allow, err)
			}
			if sent.Check(!allow) == nil {
				t.Errorf("%d of %.8q, allowed %v: taken as the opposite", c.many, c.text, allow)
			}
			b, err := json.Marshal(sent)
			if err != nil {
				t.Fatal(err)
			}
			var got, shown Fact
			if err := json.Unmarshal(b, &got); err != nil {
				t.Fatal(err)
			}
			if !got.Equal(sent) {
				t.Errorf("%d of %.8q, allowed %v: got %s", c.many, c.text, allow, b)
			}
			if err := jsonv1.Unmarshal(b, &shown); err != nil || !shown.Equal(got) {
				t.Errorf("%s is read by encoding/json as another: %v", b, err)
			}
		}
	}
}

// A guest sets nothing but what a Fact has, and what is said of another port is said of none.
func TestForeignFieldsHaveNoEffect(t *testing.T) {
	const fields = `"protocol":"tcp","address":"10.0.0.1","port":80,"owner":{"kind":"container","name":"web","id":"w"},"others":[{"kind":"unknown","name":"","id":"o"}]`
	const more = `,"outcomes":[{"state":"active","hostAddress":"0.0.0.0:80"}],"exposed":"2030-01-01T00:00:00Z","lost":true,"guest":"other","since":"2000-01-01T00:00:00Z",` +
		`"origins":[{"source":"docker"}],"dial":["10.0.0.1:80"],"contained":true,"proxyProtocol":2,"warnings":["w"],"onConflict":3,"state":"active","url":"http://x",` +
		`"hostAddresses":["0.0.0.0:80"],"observed":7,"Allow":true,"Host":["0.0.0.0:80"],"Key":{"port":81},"Fact":{"port":81}`
	var plain, full Fact
	if err := json.Unmarshal([]byte("{"+fields+"}"), &plain); err != nil {
		t.Fatal(err)
	}
	rival := strings.Replace(fields, `"id":"o"`, `"id":"o","rival":true,"Rival":true`, 1)
	if err := json.Unmarshal([]byte("{"+rival+more+"}"), &full); err != nil {
		t.Fatal(err)
	}
	if !full.Equal(plain) || !reflect.DeepEqual(full, plain) {
		t.Errorf("got %#v, want %#v", full, plain)
	}
	var a, b Answer
	const outcome = `"protocol":"tcp","address":"10.0.0.1","port":80,"outcomes":[{"state":"active","hostAddress":"127.0.0.1:80"`
	if err := json.Unmarshal([]byte("{"+outcome+"}]}"), &a); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte("{"+outcome+`,"since":"2000-01-01T00:00:00Z","sink":"x","Since":"2000-01-01T00:00:00Z"}],"owner":{"name":"x"}}`), &b); err != nil || !reflect.DeepEqual(a, b) {
		t.Errorf("got %#v, %v, want %#v", b, err, a)
	}
}

// In the guest the sources are those of the origins, as often as these are there; on a host they are those of the fact.
func TestSources(t *testing.T) {
	p := Publication{Fact: Fact{Source: "containerd"}}
	p.SetNamed("", []string{"web:80/tcp"})
	if got := slices.Collect(p.Sources()); !slices.Equal(got, []string{"containerd", SourceDemand}) {
		t.Errorf("on a host: %q", got)
	}
	p.Origins = []OriginInfo{{Origin: Origin{Source: "containerd"}}, {Origin: Origin{Source: SourceDemand, ID: "web:80/tcp"}}, {Origin: Origin{Source: SourceNAT}}}
	if got := slices.Collect(p.Sources()); !slices.Equal(got, []string{"containerd", SourceDemand, SourceNAT}) {
		t.Errorf("in the guest: %q", got)
	}
	if got := slices.Collect(new(Publication).Sources()); len(got) > 0 {
		t.Errorf("of nothing: %q", got)
	}
}
