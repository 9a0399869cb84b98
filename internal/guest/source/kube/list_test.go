// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
)

// pager is a server with Services s0, s1 and so on; it forgets a list at a page.
type pager struct {
	total, forgets int
	asked          []string
}

func (p *pager) list(o metav1.ListOptions) (runtime.Object, error) {
	p.asked = append(p.asked, fmt.Sprintf("%d from %q", o.Limit, o.Continue))
	from, _ := strconv.Atoi(o.Continue)
	if p.forgets > 0 && from >= p.forgets {
		p.forgets = 0
		return nil, apierrors.NewResourceExpired("the list is gone")
	}
	to := p.total
	l := &object.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	if o.Limit > 0 && from+int(o.Limit) < to {
		to = from + int(o.Limit)
		l.Continue = strconv.Itoa(to)
	}
	for i := from; i < to; i++ {
		l.Items = append(l.Items, *received(svc(fmt.Sprintf("s%d", i), corev1.ServiceTypeNodePort, tcp(80, int32(i)))))
	}
	return l, nil
}

func TestListsArePaged(t *testing.T) {
	const first = `250 from ""`
	for _, c := range []struct {
		name           string
		total, forgets int
		asked          []string
	}{
		{"nothing", 0, 0, []string{first}},
		{"one page", 250, 0, []string{first}},
		{"three pages", 501, 0, []string{first, `250 from "250"`, `250 from "500"`}},
		{"a list that is forgotten is read again", 501, 500, []string{first, `250 from "250"`, `250 from "500"`, `0 from ""`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &pager{total: c.total, forgets: c.forgets}
			obj, err := leanServices(p.list)
			if err != nil {
				t.Fatal(err)
			}
			l := obj.(*leanList[service])
			if !slices.Equal(p.asked, c.asked) || l.ResourceVersion != "7" || l.Continue != "" {
				t.Errorf("asked %q, want %q; list meta %+v", p.asked, c.asked, l.ListMeta)
			}
			for i, s := range l.Items {
				if want := fmt.Sprintf("default/s%d", i); s.value.id() != want {
					t.Fatalf("item %d is %s", i, s.value.id())
				}
			}
			if len(l.Items) != c.total {
				t.Errorf("%d items, want %d", len(l.Items), c.total)
			}
		})
	}
	broken := errors.New("broken")
	if _, err := leanServices(func(metav1.ListOptions) (runtime.Object, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("a page that fails: %v", err)
	}
}
